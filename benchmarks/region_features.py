"""Images for benchmarks/regions.py: features of a frozen network, and proposals of an RPN trained on them."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from rankgrad.lab.detection import model
from rankgrad.lab.detection.batches import AspectSampler, canvas, place_boxes
from rankgrad.lab.detection.config import Config
from rankgrad.lab.detection.proposals import BatchedProposals
from rankgrad.lab.detection.task import SceneSource, read_sources
from rankgrad.lab.training import optim
from rankgrad.lab.training.errors import UserError

STRIDE = 16  # of the features, in pixels
RPN_EPOCHS = 8
RPN_RATE = 0.1
ANCHORS = ((32, 64, 128, 256),)
_AT_A_TIME = 16  # images in evaluation, and while features are made


class Part(NamedTuple):
    """Images of a list, all in pixels of the network's input.

    Args:
        features: ``[C, h, w]`` of each, half precision.
        sizes: (height, width) of each.
        objects: (boxes, labels, difficult) of each.
        proposals: ``[n, 4]`` of each.
    """

    features: list[Tensor]
    sizes: list[tuple[int, int]]
    objects: list[tuple[Tensor, Tensor, Tensor]]
    proposals: list[Tensor]

    def maps(self, rows: list[int], device: torch.device) -> Tensor:
        """Features side by side, ``[n, C, h, w]``, 0 beyond an image."""
        parts = [self.features[row] for row in rows]
        high, wide = (max(part.shape[side] for part in parts) for side in (1, 2))
        out = torch.zeros(len(rows), len(parts[0]), high, wide)
        for one, part in zip(out, parts, strict=True):
            one[:, : part.shape[1], : part.shape[2]] = part
        return out.to(device)

    def targets(self, rows: list[int], device: torch.device) -> list[dict[str, Tensor]]:
        """The objects that are trained on, as torchvision has them."""
        found = [self.objects[row] for row in rows]
        return [{"boxes": b[~hard].to(device), "labels": c[~hard].to(device)} for b, c, hard in found]

    def sampler(self, size: int, seed: int) -> AspectSampler:
        """Batches of like shapes."""
        return AspectSampler(torch.tensor([wide / high for high, wide in self.sizes]), size=size, seed=seed)

    def chunks(self) -> list[list[int]]:
        """All rows, some of like shapes at a time."""
        order = torch.tensor([wide / high for high, wide in self.sizes]).argsort(stable=True)
        return [rows.tolist() for rows in order.split(_AT_A_TIME)]


@torch.inference_mode()
def features_of(source: SceneSource, body: nn.Module, config: Config, basis: tuple[Tensor, Tensor] | None) -> Part:
    """Features of a source in a basis, all without one; proposals are still missing."""
    found: dict[int, Tensor] = {}
    sizes, objects = {}, {}
    for rows in source.ratios().argsort(stable=True).split(_AT_A_TIME):
        if basis is None:  # an image of each shape is enough to find one
            rows = rows[:1]
        view = canvas(source.fetch(rows), None, config.view)
        with optim.autocast(config.precision, source.device):
            maps = body(view.images.contiguous(memory_format=torch.channels_last))
        if basis is not None:
            maps = torch.einsum("nchw,cd->ndhw", maps.float() - basis[0][:, None, None], basis[1])
        numbers = rows.tolist()
        boxes = place_boxes([source.scenes.objects[row].boxes for row in numbers], view, None)
        for row, one, size, box in zip(numbers, maps.cpu(), view.sizes, boxes, strict=True):
            high, wide = (math.ceil(side / STRIDE) for side in size)
            found[row], sizes[row] = one[:, :high, :wide].half().clone(), size
            objects[row] = (box, source.scenes.objects[row].labels, source.scenes.objects[row].difficult)
    order = sorted(found)
    return Part([found[i] for i in order], [sizes[i] for i in order], [objects[i] for i in order], [])


def principal(maps: list[Tensor], many: int) -> tuple[Tensor, Tensor]:
    """Mean, and principal components with unit variance, of features ``[C, h, w]``."""
    rows = torch.cat([one.flatten(1).T.float() for one in maps])
    values, vectors = torch.linalg.eigh(torch.cov(rows.T))
    kept = values[-many:].clamp(min=1e-6)
    return rows.mean(0), vectors[:, -many:] / kept.sqrt()


def ready(file: Path, config: Config, device: torch.device) -> tuple[Part, Part, tuple[str, ...], str]:
    """Images to train and to judge on, classes, and a line on the proposals; from the file if it is there."""
    made_by = [config.view.model_dump(), config.model.model_dump(), config.precision]
    made_by[1]["weights"] = Path(config.model.weights).name
    if file.is_file():
        kept = torch.load(file, weights_only=True)
        if kept["settings"] != made_by:
            raise UserError(f"--out: {file} was made with other settings; say another folder")
        return Part(*kept["train"]), Part(*kept["test"]), tuple(kept["classes"]), kept["note"]
    train, test, classes = read_sources(config.data, config.view.longest(), device)
    assert train is not None
    torch.manual_seed(0)
    resnet, _ = model.backbone(config.model)
    body = nn.Sequential(*list(resnet.children())[:-3]).eval().to(device, memory_format=torch.channels_last)
    basis = principal(features_of(train, body, config, None).features, config.model.pyramid)
    basis = (basis[0].to(device), basis[1].to(device))
    parts = [features_of(source, body, config, basis) for source in (train, test)]
    print(f"features of {len(parts[0].sizes)} and {len(parts[1].sizes)} images", flush=True)
    rpn = trained_rpn(parts[0], config, device)
    parts = [part._replace(proposals=proposed(rpn, part, device)) for part in parts]
    note = "; ".join(
        f"{name}: {statistics.fmean(len(p) for p in part.proposals):.0f} proposals an image, recall "
        + ", ".join(f"{100 * recall(part, level):.1f} at {level}" for level in (0.5, 0.7))
        for name, part in zip(("train", "val"), parts, strict=True)
    )
    print(note, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"settings": made_by, "train": tuple(parts[0]), "test": tuple(parts[1])}
    torch.save({**kept, "classes": list(classes), "note": note}, file)
    return parts[0], parts[1], classes, note


def _blank(maps: Tensor, sizes: list[tuple[int, int]]) -> ImageList:
    """Images of which only the shape is used."""
    high, wide = maps.shape[2:]
    return ImageList(maps.new_empty(()).expand(len(maps), 3, STRIDE * high, STRIDE * wide), sizes)


def trained_rpn(part: Part, config: Config, device: torch.device) -> BatchedProposals:
    """A region proposal network on these features."""
    torch.manual_seed(0)
    channels, most = config.model.pyramid, config.model.proposals
    anchors = model.FloatAnchors(ANCHORS, ((0.5, 1.0, 2.0),))
    head = model.FloatHead(channels, anchors.num_anchors_per_location()[0])
    before, after = {"training": 8, "testing": 5 * most}, {"training": 8, "testing": most}
    rpn = BatchedProposals(anchors, head, 0.7, 0.3, 256, 0.5, before, after, 0.7).to(device)
    rule = config.optim.model_copy(update={"lr": RPN_RATE, "milestones": (0.75 * RPN_EPOCHS,)})
    optimizer = optim.make_optimizer([{"params": list(rpn.parameters())}], rule)
    sampler = part.sampler(config.batch.size, 0)
    for step in range(RPN_EPOCHS * len(sampler)):
        optim.set_rates(optimizer, rule, step, len(sampler), RPN_EPOCHS)
        rows = sampler.at(step).tolist()
        maps = part.maps(rows, device)
        images = _blank(maps, [part.sizes[row] for row in rows])
        _, losses = rpn(images, {"0": maps}, part.targets(rows, device))
        descend(optimizer, list(rpn.parameters()), sum(losses.values()), rule.clip)
    return rpn.eval()


def descend(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: Any, clip: float) -> None:
    """One step; a loss that is not finite ends the run."""
    if not bool(loss.detach().isfinite()):
        raise UserError(f"the loss is {float(loss.detach())}")
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()


@torch.inference_mode()
def proposed(rpn: BatchedProposals, part: Part, device: torch.device) -> list[Tensor]:
    """The best boxes of each image."""
    found: dict[int, Tensor] = {}
    for rows in part.chunks():
        maps = part.maps(rows, device)
        boxes, _ = rpn(_blank(maps, [part.sizes[row] for row in rows]), {"0": maps})
        found.update(zip(rows, (one.cpu().clone() for one in boxes), strict=True))
    return [found[row] for row in range(len(found))]


def recall(part: Part, level: float) -> float:
    """The share of objects that a proposal overlaps by ``level``."""
    hits: list[bool] = []
    for row, boxes in enumerate(part.proposals):
        (target,) = part.targets([row], boxes.device)
        hits += (box_iou(target["boxes"], boxes) >= level).any(1).tolist()
    return statistics.fmean(hits) if hits else 0.0
