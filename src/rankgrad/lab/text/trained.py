"""A trained text embedding, to be used: from texts to embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.retrieval.task import embed
from rankgrad.lab.text.source import TextSource
from rankgrad.lab.training.config import shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Exportable, TrainedEmbedder
from rankgrad.pairs import unit_length


class TrainedTextEmbedder(TrainedEmbedder):
    """Texts to embeddings of unit length."""

    kind = "text"

    def embed(self, items: Sequence[str], *, progress: Callable[[int], None] = lambda done: None) -> Tensor:
        """Embeddings of texts, ``[N, dim]`` float32 on the CPU."""
        if isinstance(items, str):
            raise UserError(f"TEXTS: expected a list of texts, received the text {shown(items)}")
        given = list(items)
        if not given:
            raise UserError("TEXTS: expected texts, received none")
        for number, text in enumerate(given):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"TEXTS: expected texts that are not empty, number {number} is {shown(text)}")
        texts = Items(given, torch.zeros(len(given), dtype=torch.int64), None, given)
        source = TextSource(texts, self.device)
        return self.unit(embed(self.network, source, self.config.precision, progress=progress))

    def exportable(self) -> Exportable:
        """From tokens to embeddings; the tokenizer is written beside it."""
        network: Any = self.network
        backbone, longest = network.backbone, network.backbone.max_seq_length
        module = _FromTokens(backbone).eval()

        def texts(rows: int) -> list[str]:
            """Some of any words, longer and longer."""
            words = torch.randint(
                backbone.tokenizer.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(rows)
            )
            return [
                backbone.tokenizer.decode(row[: 2 + at], skip_special_tokens=True)
                for at, row in enumerate(words.tolist())
            ]

        def draw(rows: int) -> tuple[Tensor, ...]:
            made = backbone.preprocess(texts(rows))
            return tuple(made[name].to(self.device) for name in ("input_ids", "attention_mask"))

        try:
            with torch.inference_mode():
                same = torch.allclose(module(*draw(3)), unit_length(network(texts(3))), atol=1e-5)
        except (AttributeError, KeyError, IndexError, RuntimeError, TypeError):
            same = False  # not made of a tokenizer and tokens
        if not same:
            raise UserError(
                "RUN: expected a model of input_ids and attention_mask alone; this one is not exported"
            )
        most = "" if longest is None else f", at most {longest} tokens"
        return Exportable(
            module,
            draw,
            {"input_ids": f"[N, tokens] int64{most}", "attention_mask": "[N, tokens] int64, 0 for padding"},
            ("embeddings", f"[N, {network.embedding_size}] float32 of unit length"),
            (2, longest),
            lambda folder: Path(backbone.tokenizer.save_pretrained(str(folder / "tokenizer"))[0]).parent,
        )


class _FromTokens(nn.Module):
    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embeddings of unit length."""
        found = self.backbone({"input_ids": input_ids, "attention_mask": attention_mask})
        return unit_length(found["sentence_embedding"].float())
