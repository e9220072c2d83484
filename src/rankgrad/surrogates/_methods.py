"""The register of methods: what the complexity table and the figures go through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rankgrad.surrogates.chen2019 import chen2019_loss
from rankgrad.surrogates.fastap import fastap_loss, fastap_rank
from rankgrad.surrogates.mohapatra2018 import mohapatra2018_loss
from rankgrad.surrogates.permutahedron import permutahedron_loss, permutahedron_rank
from rankgrad.surrogates.smoothap import smoothap_loss, smoothap_rank
from rankgrad.surrogates.sodeep import LSTMSorter, sodeep_loss, sodeep_rank
from rankgrad.surrogates.yue2007 import yue2007_loss


def _no_arguments(scores: Tensor) -> Mapping[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to differentiate a ranking.

    Attributes:
        loss: ``loss(scores, relevance, *, mask=None, reduction="mean", **arguments)`` of ``[..., n]`` lists.
        complexity: What its paper (or the paper's table) claims for forward and backward; n irrelevant items and p
            relevant ones, L bins, h hidden units.
        citation: Authors, title, venue.
        general: Whether the method ranks in general (the paper's table), not for average precision alone.
        rank: ``rank(scores, *, mask=None, **arguments)``, soft ranks, where the method has them.
        arguments: The further keyword arguments that loss and rank cannot do without, for given scores: right for
            timing, while a sorter in them is untrained.

    Example:
        >>> from rankgrad.surrogates import METHODS
        >>> scores, relevance = torch.tensor([0.9, 0.8, 0.3]), torch.tensor([False, True, False])
        >>> METHODS["smoothap"].loss(scores, relevance)
        tensor(0.5000)
    """

    loss: Callable[..., Tensor]
    complexity: str
    citation: str
    general: bool
    rank: Callable[..., Tensor] | None = None
    arguments: Callable[[Tensor], Mapping[str, Any]] = _no_arguments


def _narrow_sorter(scores: Tensor) -> Mapping[str, Any]:
    return _untrained(scores, 64)


def _wide_sorter(scores: Tensor) -> Mapping[str, Any]:
    return _untrained(scores, scores.shape[-1])


def _untrained(scores: Tensor, hidden: int) -> Mapping[str, Any]:
    with scores.device:  # a wide one has gigabytes of weights: made where they are wanted
        return {"sorter": LSTMSorter(scores.shape[-1], hidden=hidden).requires_grad_(False)}


_SODEEP = "Engilberge et al.: SoDeep: a sorting deep net to learn ranking loss surrogates, CVPR 2019"

METHODS: Mapping[str, Method] = {
    "mohapatra2018": Method(
        mohapatra2018_loss,
        "O(n log p)",
        "Mohapatra et al.: Efficient optimization for rank-based loss functions, CVPR 2018",
        general=False,
    ),
    "chen2019": Method(
        chen2019_loss,
        "O(n p)",
        "Chen et al.: Towards accurate one-stage object detection with AP-loss, CVPR 2019",
        general=True,
    ),
    "yue2007": Method(
        yue2007_loss,
        "O(n^2)",
        "Yue et al.: A support vector method for optimizing average precision, SIGIR 2007",
        general=False,
    ),
    "fastap": Method(
        fastap_loss,
        "O((n + p) L)",
        "Cakir et al.: Deep metric learning to rank, CVPR 2019",
        general=True,
        rank=fastap_rank,
    ),
    "sodeep": Method(
        sodeep_loss,
        "O((n + p) h^2), h = n",
        _SODEEP,
        general=True,
        rank=sodeep_rank,
        arguments=_wide_sorter,
    ),
    "sodeep_fixed": Method(
        sodeep_loss,
        "O((n + p) h^2), h = 64",
        _SODEEP,
        general=True,
        rank=sodeep_rank,
        arguments=_narrow_sorter,
    ),
    "smoothap": Method(
        smoothap_loss,
        "O(n p)",
        "Brown et al.: Smooth-AP: smoothing the path towards large-scale image retrieval, ECCV 2020",
        general=True,
        rank=smoothap_rank,
    ),
    "permutahedron": Method(
        permutahedron_loss,
        "O(n log n)",
        "Blondel et al.: Fast differentiable sorting and ranking, ICML 2020",
        general=True,
        rank=permutahedron_rank,
    ),
}
