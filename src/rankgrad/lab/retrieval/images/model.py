"""The network: a backbone of torchvision or timm by name, pooling, norm, and a linear embedding."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankgrad.lab.retrieval.images.config import AUTO_SCALE, Channels, Model, View
from rankgrad.lab.retrieval.images.pooling import set_pooling
from rankgrad.lab.training.checkpoint import fill
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.frozen_norm import fold_frozen_norms
from rankgrad.lab.vision.images import MEAN, STD
from rankgrad.lab.vision.weights import fetching, load_file, stride_in_1x1

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Embedder(nn.Module):
    """Images ``[B, 3, H, W]`` -> embeddings ``[B, dim]``, not normalised (losses and evaluation do that)."""

    def __init__(
        self, backbone: nn.Module, features: int, dim: int, *, norm: bool = False, freeze_batch_norm: bool
    ) -> None:
        super().__init__()
        self.backbone = backbone
        # Without scale and shift: the linear layer behind it has them.
        self.norm = nn.LayerNorm(features, elementwise_affine=False) if norm else nn.Identity()
        self.embedding = nn.Linear(features, dim)
        self.embedding_size = dim
        self.freeze_batch_norm = freeze_batch_norm

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings of a batch, float32 under autocast too: ranks need more than the 8 bits of bf16."""
        features = self.backbone(images)
        with torch.autocast(images.device.type, enabled=False):
            out: Tensor = self.embedding(self.norm(features.float()))
        return out

    def train(self, mode: bool = True) -> Embedder:
        """Training mode; frozen batch norms keep using (and keep) their running statistics."""
        super().train(mode)
        if self.freeze_batch_norm:
            for module in self.modules():
                if isinstance(module, _NORMS):
                    module.eval()
        return self


def tiny() -> nn.Module:
    """A small convolutional network for small images and for quick experiments on a CPU."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


def _without_classifier(network: nn.Module) -> nn.Module:
    """Replace the last linear layer of a torchvision classifier by nothing."""
    if hasattr(network, "aux_logits"):  # GoogLeNet, Inception: in training they return more than the features
        for name, value in (("aux_logits", False), ("aux1", None), ("aux2", None), ("AuxLogits", None)):
            setattr(network, name, value)
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:  # SqueezeNets
        raise UserError(
            f"model.backbone: {type(network).__name__} ends without a linear layer; expected {_SUPPORTED}"
        )
    name = linear[-1]
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())
    return network


_SUPPORTED = "one of torchvision's image classifiers that end in a linear layer, one of timm's networks, or tiny"


def _library(name: str) -> tuple[str, str]:
    """Which library has a backbone, and its name there: ``("torchvision", "resnet50")``."""
    library, colon, bare = name.rpartition(":")
    if colon and library not in ("timm", "torchvision"):
        raise UserError(f"model.backbone: unknown library {library!r}{nearest(library, ['timm', 'torchvision'])}")
    if name == "tiny":
        return "rankgrad", name
    from torchvision import models

    ours = models.list_models(module=models)
    if library != "timm" and bare in ours:
        return "torchvision", bare
    import timm

    if library != "torchvision" and timm.is_model(bare):
        return "timm", bare
    if library != "timm" and bare in models.list_models():  # of videos, boxes, masks, flow
        raise UserError(f"model.backbone: {bare!r} of torchvision does not classify images; expected {_SUPPORTED}")
    known = {"timm": timm.list_models(), "torchvision": ours}.get(library, [*ours, *timm.list_models(), "tiny"])
    hint = nearest(bare, known)
    raise UserError(f"model.backbone: unknown name {name!r}{hint if 'did you mean' in hint else ''}")


def _backbone(name: str, pretrained: bool) -> nn.Module:
    """``tiny``, or a name of torchvision or timm; ``torchvision:NAME`` and ``timm:NAME`` say which."""
    library, bare = _library(name)
    if library == "rankgrad":
        return tiny()
    with fetching(bare):
        if library == "torchvision":
            from torchvision import models

            return _without_classifier(models.get_model(bare, weights="DEFAULT" if pretrained else None))
        import timm

        network: nn.Module = timm.create_model(bare, pretrained=pretrained, num_classes=0)
        return network


_LARGE = 128  # pixels of a crop: smaller ones leave too few places in the feature map


class _Own(NamedTuple):
    """How the images of a backbone's own training were shown to it."""

    resize: int = 256
    crop: int = 224
    mean: Channels = MEAN
    std: Channels = STD


def _own_view(config: Model) -> _Own:
    library, bare = _library(config.backbone)
    if library == "timm":
        import timm

        known: Any = timm.get_pretrained_cfg(bare)
        crop = min(known.input_size[1:])
        return _Own(round(crop / known.crop_pct), crop, tuple(known.mean), tuple(known.std))
    if library == "torchvision" and config.weights == "library":
        from torchvision import models

        shown = models.get_model_weights(bare).DEFAULT.transforms()
        return _Own(shown.resize_size[0], shown.crop_size[0], tuple(shown.mean), tuple(shown.std))
    return _Own()


def complete_view(view: View, config: Model) -> View:
    """A view with nothing left out but ``flip``: what is not set is as the backbone was trained.

    Small crops are for networks that have seen many images. From scratch crops of most of an image were better or
    level on five data sets.
    """
    own = _own_view(config)
    crop = view.crop or (min(own.crop, view.resize) if view.resize else own.crop)
    resize = view.resize or max(crop, round(own.resize * crop / own.crop))
    sizes = {"resize": resize, "crop": crop, "scale": view.scale or AUTO_SCALE[config.weights == "none"]}
    view = view.model_copy(update={**sizes, "mean": view.mean or own.mean, "std": view.std or own.std})
    if view.test_crop is None:
        side = _magnified(view)
        larger = config.weights != "none" and crop >= _LARGE and _takes(config.backbone, side)
        view = view.model_copy(update={"test_crop": side if larger else crop})
    return view


def _magnified(view: View) -> int:
    """The side at which test images show things as large as training images do, in the mean.

    A crop of a share a of the area is magnified by 1 / sqrt(a): for a between ``scale`` and 1 that is
    2 / (1 + sqrt(scale)) in the mean, where the centre crop of a test image is magnified by resize / crop alone. A
    network recognises things best at the size it was trained with (Touvron et al. 2019), and larger images cost
    nothing but time. A multiple of 32, by which most networks divide the sides of an image.

    Only for pretrained networks, where it was measured. Networks from scratch on small images lost by it:
    a feature map of 2 x 2 is pooled to something else than one of 1 x 1.
    """
    assert view.resize is not None and view.crop is not None and view.scale is not None
    if view.augment != "resized_crop":
        return view.crop
    magnified = view.crop * 2 / (1 + math.sqrt(view.scale)) * view.crop / view.resize
    return max(view.crop, 32 * math.ceil(magnified / 32))


@functools.cache
def _takes(backbone: str, side: int) -> bool:
    """Whether a backbone's features mean the same at another side: it takes such images and pools them as a whole.

    A vision transformer often does not take them. Features of a grid, as ``tiny`` has, change with its cells.
    """
    with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            network = _backbone(backbone, pretrained=False).eval()
            return set_pooling(network, "avg") and bool(network(torch.zeros(1, 3, side, side)).ndim == 2)
        except (AssertionError, RuntimeError, ValueError):  # a network that cannot be built is reported later
            return False


def build(config: Model, crop: int, seed: int) -> tuple[Embedder, dict[str, Any]]:
    """The network of these settings, and what a checkpoint must hold to build it without the weights' file.

    Args:
        config: Settings.
        crop: Side of the images, to find out how many features the backbone gives.
        seed: For the layers that start at random.
    """
    torch.manual_seed(seed)
    backbone = _backbone(config.backbone, pretrained=config.weights == "library")
    moved = False
    if config.weights not in ("library", "none"):
        moved = load_file(backbone, Path(config.weights).expanduser())
    return _embedder(backbone, config, crop), {"stride_in_1x1": moved}


def rebuild(config: Model, crop: int, metadata: dict[str, Any], weights: dict[str, Tensor]) -> Embedder:
    """The network of a checkpoint."""
    backbone = _backbone(config.backbone, pretrained=False)
    if metadata.get("stride_in_1x1"):
        stride_in_1x1(backbone)
    network = _embedder(backbone, config, crop)
    fill(network, weights)
    return network


def _embedder(backbone: nn.Module, config: Model, crop: int) -> Embedder:
    kind = "avg+max" if config.pooling == "auto" else config.pooling
    if kind != "own" and not set_pooling(backbone, kind) and config.pooling != "auto":
        raise UserError(
            f"model.pooling: {config.backbone!r} has no global average pooling that {kind} could replace; say own"
        )
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, 3, crop, crop)).shape
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f"view.crop: {config.backbone!r} does not take crops of {crop} pixels ({error})") from None
    if len(features) != 2:
        raise UserError(
            f"model.backbone: {config.backbone!r} gives features of shape {list(features)}, not [B, features]"
        )
    # Nothing is known about the activations of an untrained network: its statistics have to be found.
    frozen = config.batch_norm != "train" and config.weights != "none"
    if frozen:
        for module in backbone.modules():
            if isinstance(module, _NORMS):
                module.requires_grad_(config.batch_norm == "frozen")
        fold_frozen_norms(backbone)
    return Embedder(backbone, features[1], config.embedding, norm=config.norm == "layer", freeze_batch_norm=frozen)
