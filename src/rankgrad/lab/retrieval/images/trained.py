"""A trained image embedding, to be used: from files to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from rankgrad.lab.retrieval.images.config import Data, View
from rankgrad.lab.retrieval.images.source import ImageSource
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.retrieval.task import embed
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Exportable, TrainedEmbedder
from rankgrad.lab.vision.folders import given_images
from rankgrad.lab.vision.images import listed

if TYPE_CHECKING:
    from rankgrad.lab.vision.folders import Given

_AT_ONCE = 2048  # images that are decoded, and in memory, at a time


def _after(before: int, progress: Callable[[int], None]) -> Callable[[int], None]:
    """Progress of a part, counted from the first item of all."""
    return lambda done: progress(before + done)


class TrainedImageEmbedder(TrainedEmbedder):
    """Images to embeddings of unit length, as the run evaluated them: resized, centre crop."""

    kind = "image"

    def embed(
        self, items: Given | Sequence[Given], *, progress: Callable[[int], None] = lambda done: None
    ) -> Tensor:
        """Embeddings of image files, or images of Pillow's, ``[N, dim]`` float32 on the CPU.

        An image that cannot be read is an error; see :meth:`embed_readable`.
        """
        return self._embed(items, progress, skip=False)[0]

    def embed_readable(
        self, items: Given | Sequence[Given], *, progress: Callable[[int], None] = lambda done: None
    ) -> tuple[Tensor, list[int], list[str]]:
        """The same for the images that can be read, their rows in ``items``, and what is wrong with the others."""
        return self._embed(items, progress, skip=True)

    def _embed(
        self, items: Given | Sequence[Given], progress: Callable[[int], None], *, skip: bool
    ) -> tuple[Tensor, list[int], list[str]]:
        sources, names = given_images(items)
        parts: list[Tensor] = []
        rows: list[int] = []
        faults: list[str] = []
        for done in range(0, len(sources), _AT_ONCE):
            part = slice(done, done + _AT_ONCE)
            some = Items(sources[part], torch.zeros(len(sources[part]), dtype=torch.int64), None, names[part])
            source = ImageSource(some, Data(name="folder"), self.config.view, self.device)
            faults += source.store.faults
            if len(source) and (skip or not faults):
                parts.append(embed(self.network, source, self.config.precision, progress=_after(done, progress)))
                rows += [done + row for row in source.store.kept.tolist()]
        if faults and not (skip and parts):
            raise UserError(f"IMAGES: {listed(faults, len(sources))}")
        return self.unit(torch.cat(parts)), rows, faults

    def exportable(self) -> Exportable:
        """From pixels in [0, 1] to embeddings: the normalisation of the images is part of it."""
        view: View = self.config.view
        side = view.test_crop or view.crop
        assert side is not None
        resized = f"{view.resize} x {view.resize}" if view.shape == "square" else f"a short side of {view.resize}"
        seen = f"resized to {resized}, of that the centre {view.crop} x {view.crop}"
        if side != view.crop:
            seen += f", resized to {side} x {side}"
        shape = (3, side, side)
        return Exportable(
            _FromPixels(self.network, view).to(self.device).eval(),
            lambda rows: (torch.rand(rows, *shape).to(self.device),),
            {"images": f"[N, 3, {side}, {side}] float32: RGB in [0, 1], {seen}"},
            ("embeddings", f"[N, {self.config.model.embedding}] float32 of unit length"),
        )


class _FromPixels(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, view: View) -> None:
        super().__init__()
        self.network = network
        assert view.mean is not None and view.std is not None
        self.register_buffer("mean", torch.tensor(view.mean)[:, None, None])
        self.register_buffer("std", torch.tensor(view.std)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings of unit length."""
        return functional.normalize(self.network((images - self.mean) / self.std), dim=-1)
