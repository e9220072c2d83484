"""The network: a backbone of torchvision or timm by name, and a linear embedding in place of its classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.retrieval.config import Model
from rankgrad.lab.training.checkpoint import fill
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.frozen_norm import carry_frozen_norms
from rankgrad.lab.vision.weights import fetching, load_file, stride_in_1x1

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Embedder(nn.Module):
    """Images ``[B, 3, H, W]`` -> embeddings ``[B, dim]``, not normalised (losses and evaluation do that)."""

    def __init__(self, backbone: nn.Module, features: int, dim: int, *, freeze_batch_norm: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.embedding = nn.Linear(features, dim)
        self.freeze_batch_norm = freeze_batch_norm

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings of a batch, float32 under autocast too: ranks need more than the 8 bits of bf16."""
        features = self.backbone(images)
        with torch.autocast(images.device.type, enabled=False):
            out: Tensor = self.embedding(features.float())
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
    """A small convolutional network for small images and for trying things out on a CPU."""
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
    name = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())
    return network


def _backbone(name: str, pretrained: bool) -> nn.Module:
    """``tiny``, or a name of torchvision or timm; ``torchvision:NAME`` and ``timm:NAME`` say which."""
    library, colon, bare = name.rpartition(":")
    if colon and library not in ("timm", "torchvision"):
        raise UserError(f"model.backbone: unknown library {library!r}{nearest(library, ['timm', 'torchvision'])}")
    if name == "tiny":
        return tiny()
    from torchvision import models

    ours = [n for n in models.list_models() if "." not in n and "/" not in n]
    if library != "timm" and bare in ours:
        with fetching(bare):
            return _without_classifier(models.get_model(bare, weights="DEFAULT" if pretrained else None))
    import timm

    if library != "torchvision" and timm.is_model(bare):
        with fetching(bare):
            network: nn.Module = timm.create_model(bare, pretrained=pretrained, num_classes=0)
        return network
    known = {"timm": timm.list_models(), "torchvision": ours}.get(library, [*ours, *timm.list_models(), "tiny"])
    hint = nearest(bare, known)
    raise UserError(f"model.backbone: unknown name {name!r}{hint if 'did you mean' in hint else ''}")


def build(config: Model, crop: int, seed: int) -> tuple[Embedder, dict[str, Any]]:
    """The network of these settings, and what a checkpoint must remember to build it without the weights' file.

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


def rebuild(config: Model, crop: int, notes: dict[str, Any], weights: dict[str, Tensor]) -> Embedder:
    """The network of a checkpoint."""
    backbone = _backbone(config.backbone, pretrained=False)
    if notes.get("stride_in_1x1"):
        stride_in_1x1(backbone)
    network = _embedder(backbone, config, crop)
    fill(network, weights)
    return network


def _embedder(backbone: nn.Module, config: Model, crop: int) -> Embedder:
    with torch.no_grad():
        features = backbone.eval()(torch.zeros(1, 3, crop, crop)).shape
    if len(features) != 2:
        raise UserError(
            f"model.backbone: {config.backbone!r} gives features of shape {list(features)}, not [B, features]"
        )
    frozen = config.batch_norm == "frozen"
    if frozen:
        carry_frozen_norms(backbone)
    return Embedder(backbone, features[1], config.embedding, freeze_batch_norm=frozen)
