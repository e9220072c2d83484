"""From a feature map to features: what a backbone's global average pooling may be replaced by."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

#: Where torchvision's and timm's networks have their global pooling.
_PLACES = ("avgpool", "global_pool", "head.global_pool")
_POWER, _SMALLEST = 3.0, 1e-6  # of generalised mean pooling


class Pool(nn.Module):
    r"""``[B, C, H, W]`` -> ``[B, C, 1, 1]``, or ``[B, C]`` with ``flat``, in float32.

    ``avg`` and ``max`` over the places, their sum ``avg+max``, or the generalised mean ``gem``,
    :math:`(\mathrm{mean}\, x^3)^{1/3}` of what is positive, which lies between the two.
    """

    def __init__(self, kind: str, *, flat: bool) -> None:
        super().__init__()
        self.kind, self.flat = kind, flat

    def forward(self, x: Tensor) -> Tensor:
        """Pooled features; bf16 has 8 bits, too few for a sum of a maximum and a mean."""
        x = x.float()
        if self.kind == "avg":
            x = x.mean((2, 3), keepdim=True)
        elif self.kind == "max":
            x = x.amax((2, 3), keepdim=True)
        elif self.kind == "gem":
            x = x.clamp(min=_SMALLEST).pow(_POWER).mean((2, 3), keepdim=True).pow(1 / _POWER)
        else:
            x = x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True)
        return x.flatten(1) if self.flat else x

    def extra_repr(self) -> str:
        return self.kind


def _global_pooling(backbone: nn.Module) -> tuple[str, bool] | None:
    """Where the network averages its whole feature map, and whether that module flattens its output."""
    for place in _PLACES:
        try:
            module: Any = backbone.get_submodule(place)
        except AttributeError:
            continue
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            return place, False
        pool: Any = getattr(module, "pool", None)  # timm wraps it
        if isinstance(pool, nn.AdaptiveAvgPool2d):
            return place, not isinstance(module.flatten, nn.Identity)
        if type(pool).__name__ == "FastAdaptiveAvgPool" and pool.dim == (2, 3):  # not channels last
            return place, pool.flatten
    return None


def set_pooling(backbone: nn.Module, kind: str) -> bool:
    """Replace the global average pooling of a network in place; says whether it has one.

    A transformer, or a network that pools in its forward method, has none that can be replaced.
    """
    found = _global_pooling(backbone)
    if found is None:
        return False
    place, flat = found
    parent, _, name = place.rpartition(".")
    setattr(backbone.get_submodule(parent), name, Pool(kind, flat=flat))
    return True
