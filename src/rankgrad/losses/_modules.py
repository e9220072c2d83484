"""What the loss Modules on score lists share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rankgrad.reach import Margin, margin_of, reach_of, text_of


class ListLoss(nn.Module):
    """Base of :class:`NDCGLoss` and :class:`SpearmanLoss`: a loss function of score lists with its settings."""

    def __init__(self, lam: float | None, window: float | None, margin: Margin) -> None:
        super().__init__()
        reach_of(lam, window)
        margin_of(margin)
        self.lam, self.window, self.margin = lam, window, margin

    def function(self, scores: Tensor, target: Tensor, **given: Any) -> Tensor:
        """The loss, with the settings that only a subclass has."""
        raise NotImplementedError

    def forward(
        self,
        scores: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int | None = None,
    ) -> Tensor:
        """Mean loss of the lists.

        Args:
            scores: ``[..., n]``, or ``[N]`` with ``groups``.
            target: Relevance, grades or target values in the same shape, as the function takes them.
            mask: bool, broadcast to ``scores``; False = the item does not exist.
            groups: int64 ids ``[N]`` in any order: each id is a list.
            num_groups: How many ids there are.
        """
        return self.function(
            scores,
            target,
            lam=self.lam,
            window=self.window,
            margin=self.margin,
            mask=mask,
            groups=groups,
            num_groups=num_groups,
        )

    def extra_repr(self) -> str:
        return text_of(self.lam, self.window, self.margin)
