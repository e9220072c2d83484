"""torchvision's region proposal network and region sampling, for a batch at once.

The same proposals, targets and losses as torchvision's loops over images (up to which random regions are
sampled), with a tenth of the calls and next to no waiting for the device: on a fast GPU those loops take longer
than the network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, concat_box_prediction_layers
from torchvision.ops import nms

from rankgrad.detection.boxes import sampled_giou_loss
from rankgrad.detection.objectness import objectness_loss
from rankgrad.lab.detection.config import Boxes
from rankgrad.lab.detection.matching import Truth, matches, sample


def suppressed(boxes: Tensor, alive: Tensor, threshold: float, *, every: int = 8) -> Tensor:
    """Greedy non-maximum suppression of many groups at once: which boxes stay, ``[groups, n]``.

    A box stays if no better box that stays overlaps it too much. Read as an equation for "stays" this has one
    solution, and applying it again and again reaches it: after k rounds all boxes are right whose chain of
    suppressions is shorter than k. A round is a product of a 0/1 matrix with a vector for each group.

    Args:
        boxes: ``[groups, n, 4]``, best first.
        alive: ``[groups, n]``; False = no box.
        threshold: Boxes with a larger IoU exclude each other.
        every: Rounds between two checks whether anything still changes (each waits for the device).
    """
    left, top, right, bottom = boxes.unbind(2)
    area = (right - left) * (bottom - top)

    def extent(low: Tensor, high: Tensor) -> Tensor:
        return (
            torch.minimum(high.unsqueeze(2), high.unsqueeze(1)) - torch.maximum(low.unsqueeze(2), low.unsqueeze(1))
        ).clamp_(min=0)

    inside = extent(left, right).mul_(extent(top, bottom))
    close = inside / (area.unsqueeze(2) + area.unsqueeze(1)).sub_(inside) > threshold
    # [groups, better, worse]; half precision holds 0, 1, and sums of them well enough to tell 0 from more
    dtype = torch.bfloat16 if boxes.is_cuda else torch.float32
    excludes = (close & alive.unsqueeze(2)).triu_(1).to(dtype)
    there = alive.unsqueeze(1).to(dtype)  # [groups, 1, n], 1 or 0 as all that follow
    stays = there
    with torch.autocast(boxes.device.type, enabled=False):
        for _ in range(0, boxes.shape[1] + every, every):
            before = stays
            for _ in range(every):  # 1 less the number that exclude it: above 0 only if there are none
                stays = torch.baddbmm(there, stays, excludes, alpha=-1).relu_()
            if torch.equal(stays, before):
                break
    return stays.squeeze(1) > 0


def _suppressed_one_by_one(boxes: Tensor, alive: Tensor, threshold: float) -> Tensor:
    """The same by torchvision's loop, faster on a CPU."""
    stays = torch.zeros_like(alive)
    for group, there, out in zip(boxes, alive, stays, strict=True):
        rows = there.nonzero().flatten()
        out[rows[nms(group[rows], torch.arange(len(rows), 0, -1).to(group), threshold)]] = True
    return stays


class BatchedProposals(RegionProposalNetwork):  # type: ignore[misc]
    """The region proposal network without a loop over images.

    Attributes:
        ranking_weight: Of the ranking loss of all anchors' objectness; None: torchvision's cross entropy of those
            that are sampled. Boxes are those of sampled anchors either way.
    """

    ranking_weight: float | None = None

    def forward(
        self, images: ImageList, features: dict[str, Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> Any:
        """Proposals of each image, and the losses in training."""
        maps = list(features.values())
        scores, regression = self.head(maps)
        anchors = self.anchor_generator(images, maps)
        levels = [level[0].numel() for level in scores]
        objectness, deltas = concat_box_prediction_layers(scores, regression)
        objectness, deltas = objectness.reshape(len(anchors), -1), deltas.reshape(len(anchors), -1, 4)
        losses = {}
        if self.training:
            if targets is None:
                raise ValueError("targets: expected boxes and labels in training, received None")
            # Before the proposals, for which Python waits: the GPU still has the backbone to do.
            losses = self.losses(objectness, deltas, anchors[0], Truth.of(targets))
        boxes = self.box_coder.decode(deltas.detach().flatten(0, 1), anchors).reshape(len(anchors), -1, 4)
        return self.proposals(boxes, objectness.detach(), images.image_sizes, levels), losses

    def proposals(
        self, boxes: Tensor, objectness: Tensor, sizes: list[tuple[int, int]], levels: list[int]
    ) -> list[Tensor]:
        """The best boxes of each image after suppression within each level, best first."""
        images, most = len(boxes), max(min(self.pre_nms_top_n(), level) for level in levels)
        kept_boxes = boxes.new_zeros(images, len(levels), most, 4)
        kept = objectness.new_full((images, len(levels), most), -torch.inf)
        begin = 0
        for number, count in enumerate(levels):
            best, at = objectness[:, begin : begin + count].topk(min(self.pre_nms_top_n(), count), dim=1)
            kept[:, number, : at.shape[1]] = best  # not the sigmoid, which makes 1 of all from 17 on
            kept_boxes[:, number, : at.shape[1]] = boxes.gather(1, (at + begin).unsqueeze(2).expand(-1, -1, 4))
            begin += count
        edge = torch.tensor([(w, h, w, h) for h, w in sizes], dtype=boxes.dtype).to(
            boxes.device, non_blocking=True
        )
        kept_boxes = kept_boxes.clamp(min=0).minimum(edge[:, None, None])
        sides = kept_boxes[..., 2:] - kept_boxes[..., :2]
        there = (kept.sigmoid() >= self.score_thresh) & (kept > -torch.inf)
        alive = there & (sides >= self.min_size).all(-1)
        suppress = suppressed if boxes.is_cuda else _suppressed_one_by_one
        stays = suppress(kept_boxes.flatten(0, 1), alive.flatten(0, 1), self.nms_thresh)
        kept = kept.masked_fill(~stays.reshape(kept.shape), -torch.inf).flatten(1)
        best, at = kept.topk(min(self.post_nms_top_n(), kept.shape[1]), dim=1)
        chosen = kept_boxes.flatten(1, 2).gather(1, at.unsqueeze(2).expand(-1, -1, 4))
        return [rows[:many] for rows, many in zip(chosen, (best > -torch.inf).sum(1).tolist(), strict=True)]

    def losses(self, objectness: Tensor, deltas: Tensor, anchors: Tensor, truth: Truth) -> dict[str, Tensor]:
        """Objectness of sampled anchors, or of all of them where it is ranked, and boxes of sampled ones."""
        matcher, sampler = self.proposal_matcher, self.fg_bg_sampler
        best, kind = matches(
            truth,
            anchors.unsqueeze(0),
            high=matcher.high_threshold,
            low=matcher.low_threshold,
            keep_best=matcher.allow_low_quality_matches,
        )
        size = sampler.batch_size_per_image
        positives = int(size * sampler.positive_fraction)
        columns, chosen = sample(kind, size=size, positives=positives)
        total = chosen.sum().clamp(min=1)
        if self.ranking_weight is None:
            wanted = kind.gather(1, columns).clamp(min=0).to(objectness)
            each = F.binary_cross_entropy_with_logits(objectness.gather(1, columns), wanted, reduction="none")
            classified = each.where(chosen, 0).sum() / total
        else:
            classified = self.ranking_weight * objectness_loss(objectness, kind)
        front = columns[:, : min(positives, kind.shape[1])]  # the rest is background
        there = chosen[:, : front.shape[1]]
        four = front.unsqueeze(2).expand(-1, -1, 4)
        object_of = best.gather(1, front).unsqueeze(2).expand(-1, -1, 4)
        truth_boxes = truth.boxes.gather(1, object_of).reshape(-1, 4)
        # where nothing was chosen a dummy box: it is masked out of the sum
        truth_boxes = torch.where(there.reshape(-1, 1), truth_boxes, anchors[front].reshape(-1, 4))
        target = self.box_coder.encode_single(truth_boxes, anchors[front].reshape(-1, 4)).reshape(four.shape)
        boxes = F.smooth_l1_loss(deltas.gather(1, four), target, beta=1 / 9, reduction="none").sum(2)
        return {
            "loss_objectness": classified,
            "loss_rpn_box_reg": boxes.where(there, 0).sum() / total,
        }


class BatchedHeads(RoIHeads):  # type: ignore[misc]
    """torchvision's heads with the regions of all images sampled at once, and the box loss of the settings.

    Attributes:
        boxes: The settings; None: torchvision's own.
    """

    boxes: Boxes | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in torchvision, with the loss under ``loss_box_reg``."""
        if not self.training or self.boxes is None:
            return super().forward(*args, **kwargs)
        seen: list[Any] = []
        hook = self.box_predictor.register_forward_hook(lambda module, inputs, output: seen.append(output))
        try:
            result, losses = super().forward(*args, **kwargs)
        finally:
            hook.remove()
            taken = self.__dict__.pop("_taken", ())
        if self.boxes.name == "giou":
            losses["loss_box_reg"] = sampled_giou_loss(self.box_coder, seen[0][1], *taken)
        losses["loss_box_reg"] = losses["loss_box_reg"] * self.boxes.box_weight
        return result, losses

    def select_training_samples(self, proposals: list[Tensor], targets: list[dict[str, Tensor]] | None) -> Any:
        """Regions, their objects, labels and regression targets of each image, as torchvision returns them."""
        self.check_targets(targets)
        assert targets is not None
        truth = Truth.of(targets)
        counts = [len(p) + len(t["boxes"]) for p, t in zip(proposals, targets, strict=True)]
        most = max(*counts, 1)
        boxes = truth.boxes.new_zeros(len(counts), most, 4)
        for row, part, target in zip(boxes, proposals, targets, strict=True):
            row[: len(part)] = part
            row[len(part) : len(part) + len(target["boxes"])] = target["boxes"]
        there = torch.arange(most).unsqueeze(0) < torch.tensor(counts).unsqueeze(1)
        matcher, sampler = self.proposal_matcher, self.fg_bg_sampler
        best, kind = matches(truth, boxes, high=matcher.high_threshold, low=matcher.low_threshold, keep_best=False)
        kind = kind.masked_fill(~there.to(boxes.device, non_blocking=True), -1)
        size = sampler.batch_size_per_image
        columns, chosen = sample(kind, size=size, positives=int(size * sampler.positive_fraction))
        # to the front what was chosen; an image with too few regions has less of them
        columns = columns.gather(1, chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True))[:, :size]
        many = chosen.sum(1).tolist()
        best, kind = best.gather(1, columns), kind.gather(1, columns)
        regions = boxes.gather(1, columns.unsqueeze(2).expand(-1, -1, 4))
        labels = truth.labels.gather(1, best).where(kind == 1, 0)
        objects = truth.boxes.gather(1, best.unsqueeze(2).expand(-1, -1, 4))
        out = [[row[:n] for row, n in zip(rows, many, strict=True)] for rows in (regions, best, labels, objects)]
        targets = self.box_coder.encode(out[3], out[0])
        if self.boxes is not None:
            self.__dict__["_taken"] = out[0], out[2], targets
        return out[0], out[1], out[2], targets
