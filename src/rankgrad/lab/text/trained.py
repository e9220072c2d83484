"""A trained text embedding, to be used: from texts to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.retrieval.task import embed
from rankgrad.lab.text.source import TextSource
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Embedder, Exportable


class TrainedTexts(Embedder):
    """Texts to embeddings of unit length."""

    kind = "text"

    def embed(self, items: Sequence[str], *, progress: Callable[[int], None] = lambda done: None) -> Tensor:
        """Embeddings of texts, ``[N, dim]`` float32 on the CPU."""
        if not items:
            raise UserError("TEXTS: expected texts, received none")
        texts = Items(list(items), torch.zeros(len(items), dtype=torch.int64), None, list(items))
        source = TextSource(texts, self.device)
        return self.unit(embed(self.network, source, self.config.precision, progress=progress))

    def exportable(self) -> Exportable:
        """Not from here: the run's folder has what sentence-transformers exports, tokenizer included."""
        raise UserError(
            "RUN: a text model is not exported from here; RUN/model is a sentence-transformers model, which "
            "SentenceTransformer(..., backend='onnx') exports together with its tokenizer"
        )
