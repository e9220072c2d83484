"""Detection as a task of the training loop."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankgrad import distributed
from rankgrad.detection.drop_in import use_ranking_loss
from rankgrad.detection.inference import detections_of
from rankgrad.detection.region_loss import RegionLoss
from rankgrad.lab.detection import data
from rankgrad.lab.detection.batches import AspectSampler, canvas, place_boxes
from rankgrad.lab.detection.config import Boxes, Config, Data
from rankgrad.lab.detection.evaluate import DetectionMetrics, evaluate
from rankgrad.lab.detection.scenes import NARROWEST, Objects, Scenes, notes_on
from rankgrad.lab.training import log, optim
from rankgrad.lab.training.checkpoint import Checkpoint
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reuse import read_once
from rankgrad.lab.training.seeding import step_generator
from rankgrad.lab.training.task import Task, check_batch_size
from rankgrad.lab.training.trained import Trained
from rankgrad.lab.vision.decoding import size_of
from rankgrad.lab.vision.images import Store, decode, leave_out, listed, sent

if TYPE_CHECKING:  # torchvision takes a second to import, and `rankgrad ls` does not need it
    from rankgrad.lab.detection import model

Detections = list[dict[str, Tensor]]

#: The norms of gradients are measured once in so many steps, NaN in between: that is ten launches, about as many
#: as the recorded loss itself.
WATCH_EVERY = 10


class SceneSource(Store):
    """The images of a split with their objects, in pixels of the images as they are read.

    An image of twice the side that is needed or more is reduced while it is read, and its boxes with it.
    """

    def __init__(
        self, scenes: Scenes, config: Data, longest: int, device: torch.device, progress: Callable[[int], None]
    ) -> None:
        annotated = {id(source): size for source, size in zip(scenes.sources, scenes.sizes, strict=True)}

        def read(source: Any) -> Tensor:
            size = size_of(source)
            if any(math.isfinite(b) and a != b for a, b in zip(size, annotated[id(source)], strict=True)):
                width, height = annotated[id(source)]
                raise ValueError(f"{size[0]} x {size[1]} pixels, {width:g} x {height:g} in the annotation")
            return decode(source, longest)

        super().__init__(
            scenes.sources,
            scenes.names,
            read,
            cache=config.cache,
            workers=config.workers,
            device=device,
            progress=progress,
        )
        self.scenes = (scenes.take(self.kept) if self.faults else scenes).resized(self.shapes)

    def ratios(self) -> Tensor:
        """Width / height of each image."""
        return self.shapes[:, 1] / self.shapes[:, 0]


@read_once
def read_sources(
    config: Data, longest: int, device: torch.device, classes: tuple[str, ...] | None = None
) -> tuple[SceneSource | None, SceneSource, tuple[str, ...]]:
    """Training images (not for the ``classes`` of a checkpoint), test images and the classes.

    Read once for all seeds of a command. ``longest`` is a side that images need not exceed.
    """
    splits = data.read(config, classes)
    total = len(splits.train or ()) + len(splits.test)
    with log.progress("reading images", total, 0, show=distributed.process_index() == 0) as bar:
        if splits.faults:
            bar.say(f"skipped {len(splits.faults)} annotations: {'; '.join(splits.faults[:5])}")

        def read(scenes: Scenes, done: int) -> SceneSource:
            return SceneSource(scenes, config, longest, device, lambda count: bar.advance(done + count))

        train = None if splits.train is None else read(splits.train, 0)
        test = read(splits.test, total - len(splits.test))
        if skipped := leave_out([train, test], total, config.broken):
            bar.say(skipped)
        for one in (train, test):
            if one is not None and not len(one.scenes):
                raise UserError(f"--data: {listed(one.faults, len(one.faults))}")
    return train, test, splits.classes


def detect(
    network: model.Detector,
    source: SceneSource,
    config: Config,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Detections]:
    """Detections on all images of a source, for each way of scoring; processes share the work.

    Boxes are in pixels of the files; everything is on the CPU. The network runs once for all scorings.
    ``progress`` is called with the number of images done so far.
    """
    network.eval()
    order = source.ratios().argsort(stable=True)  # like shapes together
    # whole batches are shared out: the images of a batch decide the size of its canvas
    mine = order.split(config.batch.test_size)[distributed.process_index() :: distributed.count()]
    found: dict[str, dict[int, dict[str, Tensor]]] = {scores: {} for scores in config.scorings()}
    with torch.inference_mode():
        for at, rows in enumerate(mine):
            view = canvas(source.fetch(rows, mine[at + 1] if at + 1 < len(mine) else None), None, config.view)
            with optim.autocast(config.precision, source.device):
                logits, regression, proposals = network.regions(view.images, view.sizes)
            for scores, out in found.items():
                detected = detections_of(network.roi_heads, logits, regression, proposals, view.sizes, scores)
                out.update(zip(rows.tolist(), _in_files(detected, view.scales), strict=True))
            progress(sum(map(len, mine[: at + 1])))
    return {scores: [out[row] for row in range(len(source.scenes))] for scores, out in _everyone(found).items()}


def _in_files(detected: Detections, scales: Tensor) -> Detections:
    """Boxes in pixels of the files, on the CPU in one transfer."""
    counts = [len(one["scores"]) for one in detected]
    packed = torch.cat(
        [torch.cat([d["boxes"], d["scores"].unsqueeze(1), d["labels"].unsqueeze(1)], dim=1) for d in detected]
    ).cpu()
    return [
        {"boxes": part[:, :4] / scale.repeat(2), "scores": part[:, 4], "labels": part[:, 5].long()}
        for part, scale in zip(packed.split(counts), scales, strict=True)
    ]


def _everyone(found: dict[str, dict[int, dict[str, Tensor]]]) -> dict[str, dict[int, dict[str, Tensor]]]:
    """What all processes found."""
    if not distributed.active():
        return found
    parts: list[Any] = [None] * distributed.count()
    torch.distributed.all_gather_object(parts, found)
    return {scores: {row: one for part in parts for row, one in part[scores].items()} for scores in found}


class Measured(NamedTuple):
    """Detections on all images of a source and their average precisions, for each way of scoring."""

    detections: dict[str, Detections]
    metrics: dict[str, DetectionMetrics]

    def summary(self) -> dict[str, float]:
        """Means over the classes in percent."""
        return {key: value for scores, one in self.metrics.items() for key, value in one.summary(scores).items()}


def measure(
    network: model.Detector,
    source: SceneSource,
    config: Config,
    classes: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Measured:
    """Detect on all images of a source, and compare with its objects."""
    found = detect(network, source, config, progress)
    objects, protocol = source.scenes.objects, config.protocol()
    return Measured(found, {scores: evaluate(one, objects, classes, protocol) for scores, one in found.items()})


class DetectionTask(Task):
    """Train a Faster R-CNN; see :class:`rankgrad.lab.training.task.Task`.

    Args:
        config: The settings.
        device: Where to train.
    """

    config_class = Config
    same_shapes = False  # a batch is as large as its largest image

    def __init__(self, config: Config, device: torch.device) -> None:
        from rankgrad.lab.detection import model

        self.config, self.device = config, device
        self.headline = f"{'AP' if config.protocol() == 'coco' else 'AP50'} {config.scoring()}"
        check_batch_size(config.batch.size)
        data.check(config.data)
        model.backbone(config.model)  # a wrong name or file of weights is an error before the data is read
        train, self.test, self.classes = read_sources(config.data, config.view.longest(), device)
        assert train is not None
        self.source = train
        self.objects = [_to_train_on(*one) for one in zip(train.scenes.objects, train.scenes.sizes, strict=True)]
        self.notes = notes_on(self.objects, self.test.scenes.objects, self.classes)
        try:
            self.sampler = AspectSampler(train.ratios(), size=config.batch.size, seed=config.seed)
        except ValueError as error:
            raise UserError(f"batch.{error}") from None
        self.steps_per_epoch = len(self.sampler)
        self.notes += optim.schedule_warnings(config.optim, self.steps_per_epoch, config.epochs)
        self.items_per_step = config.batch.size
        self.tested_items = len(self.test.scenes)
        self.network, self._metadata = model.build(
            config.model, config.view, regions=config.batch.regions, classes=self.classes, seed=config.seed
        )
        self.network.to(device)
        if device.type == "cuda":
            self.network = self.network.to(memory_format=torch.channels_last)
        if config.boxes != Boxes():
            self.network.roi_heads.boxes = config.boxes
        if config.rpn.name == "ranking":
            self.network.rpn.ranking_weight = config.rpn.rpn_weight
        self.loss: nn.Module = nn.Identity()  # cross entropy: torchvision's own, nothing is exchanged
        self.parts: dict[str, Tensor] = {}
        self._unknown = torch.tensor(torch.nan, device=device)
        self._watched = True
        if config.loss.name == "ranking":
            self.loss = RegionLoss(**config.loss.options(), distributed=True).to(device)
            use_ranking_loss(self.network, self.loss)
            self.network.roi_heads.replayed_loss.register_forward_pre_hook(self._watch_ranking)
        else:
            self.network.roi_heads.box_predictor.register_forward_hook(self._watch_cross_entropy)
        self._measured: tuple[dict[str, Tensor], Measured] | None = None  # and the weights it was measured with

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters that are trained, at one rate."""
        return [{"params": [p for p in self.network.parameters() if p.requires_grad]}]

    def _watch_ranking(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Note the size of the gradient at the class logits, and of the one cross entropy would give."""
        logits, labels, *mask = inputs
        if not (self._watched and logits.requires_grad):
            return
        wrong = logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])
        there = mask[0] if mask else torch.ones_like(labels, dtype=torch.bool)
        self.parts["logit_gradient_ce"] = (wrong * there.unsqueeze(1)).norm() / there.sum().clamp(min=1)
        self._watch(logits)

    def _watch_cross_entropy(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        if self._watched and output[0].requires_grad:
            self._watch(output[0], "logit_gradient_ce")

    def _watch(self, logits: Tensor, *also: str) -> None:
        def note(gradient: Tensor) -> None:
            self.parts.update(dict.fromkeys(("logit_gradient", *also), gradient.detach().norm()))

        logits.register_hook(note)

    def batch_loss(self, network: nn.Module, step: int) -> Tensor:
        """Resize and mirror this process's part of a batch, and take all losses of the detector."""
        everyone = self.sampler.at(step)
        mine = distributed.share(everyone)
        images = self.source.fetch(mine, distributed.share(self.sampler.at(step + 1)))
        generator = step_generator(self.config.seed, step)
        flips = torch.rand(len(everyone), generator=generator) < (0.5 if self.config.view.flip else 0.0)
        flips = distributed.share(flips)
        smallest, largest = self.config.view.jitter
        factor = smallest + (largest - smallest) * float(torch.rand((), generator=generator))
        view = canvas(images, flips, self.config.view, factor)
        objects = [self.objects[row] for row in mine.tolist()]
        targets = self._targets(place_boxes([o.boxes for o in objects], view, flips), objects)
        self._watched = step % WATCH_EVERY == 0
        self.parts.clear()
        self.parts.update(dict.fromkeys(("logit_gradient", "logit_gradient_ce"), self._unknown))
        losses = network(view.images, view.sizes, targets)
        self.parts.update({name: value.detach() for name, value in losses.items()})
        total: Tensor = torch.stack([value.float() for value in losses.values()]).sum()
        return total

    def _targets(self, boxes: list[Tensor], objects: list[Objects]) -> list[dict[str, Tensor]]:
        """Boxes and labels on the device, in one transfer each."""
        counts = [len(b) for b in boxes]
        there = sent(torch.cat(boxes), self.device).split(counts)
        labels = sent(torch.cat([o.labels for o in objects]), self.device).split(counts)
        return [{"boxes": b, "labels": c} for b, c in zip(there, labels, strict=True)]

    def measure(self) -> Measured:
        """Detections on the test images and their average precisions."""
        weights = {name: value.clone() for name, value in self.network.state_dict().items()}
        if self._measured is not None and all(torch.equal(weights[n], v) for n, v in self._measured[0].items()):
            return self._measured[1]  # the best weights are often those just measured
        measured = measure(self.network, self.test, self.config, len(self.classes))
        self._measured = (weights, measured)
        return measured

    def evaluate(self) -> dict[str, float]:
        """AP50, AP75 and AP over thresholds in percent, for each way of scoring."""
        return self.measure().summary()

    def describe(self) -> dict[str, Any]:
        """What the report says about the data."""
        names = repr((self.source.scenes.names, self.test.scenes.names, list(self.classes)))
        digest = hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()
        counts = {"training images": len(self.source.scenes.names), "test images": len(self.test.scenes.names)}
        return {"counts": counts, "items": digest, "notes": self.notes}

    def metadata(self) -> dict[str, Any]:
        """What the network needs to be built again."""
        return self._metadata

    def finish(self, folder: Path) -> None:
        """Write the average precisions of the classes and some detections, for the report."""
        from rankgrad.lab.detection.report import write_examples

        measured = self.measure()
        if distributed.process_index() == 0:
            write_examples(folder, self.test, self.classes, self.config.scoring(), *measured)

    @classmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """Losses and data sets, a line each."""
        losses = {
            "ranking": "mAP and pooled AP of the regions' class scores beside cross entropy; form, ranked, ...",
            "cross_entropy": "torchvision's own",
        }
        return {"loss": losses, "data set": dict(data.READERS)}

    @classmethod
    def evaluate_checkpoint(cls, checkpoint: Checkpoint, device: torch.device) -> dict[str, float]:
        """The metrics of a checkpoint on its data set's test images."""
        config, _, metadata = checkpoint
        network = _rebuilt(checkpoint).to(device)
        _, source, classes = read_sources(config.data, config.view.longest(), device, tuple(metadata["classes"]))
        with log.progress("detecting", len(source.scenes), 0, show=True) as bar:
            return measure(network, source, config, len(classes), bar.advance).summary()

    @classmethod
    def trained(cls, checkpoint: Checkpoint, device: torch.device) -> Trained:
        """From image files to boxes."""
        from rankgrad.lab.detection.trained import TrainedDetector

        classes = tuple(checkpoint.metadata["classes"])
        return TrainedDetector(checkpoint.config, _rebuilt(checkpoint), device, classes)

    @classmethod
    def report_sections(cls, run: Path, config: Config, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """The result, average precision by class, gradients and detections, of this run and others."""
        from rankgrad.lab.detection.report import sections

        return sections(run, config, beside)


def _rebuilt(checkpoint: Checkpoint) -> model.Detector:
    """The network of a checkpoint."""
    from rankgrad.lab.detection import model

    config, weights, metadata = checkpoint
    regions = config.batch.regions
    return model.rebuild(config.model, config.view, regions=regions, metadata=metadata, weights=weights)


def _to_train_on(objects: Objects, size: tuple[float, float]) -> Objects:
    """The objects that are not difficult and have an area in an image of this width and height."""
    sides = objects.boxes[:, 2:] - objects.boxes[:, :2]
    kept = ~objects.difficult & (sides > NARROWEST * torch.tensor(size)).all(1)
    return Objects(objects.boxes[kept], objects.labels[kept], objects.difficult[kept])
