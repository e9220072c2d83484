"""What the losses here take as a loss of score lists, and how a model card names it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

#: Score lists and their relevance -> a loss: ``loss(scores, relevance, mask=mask)``.
ListLossFunction = Callable[..., Tensor]


def described(loss: object) -> str:
    """A loss in the words of a model card."""
    return repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
