"""Texts as a source: the network reads them itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rankgrad.lab.retrieval.source import Draw, Source

if TYPE_CHECKING:
    from rankgrad.lab.text.data import Judgements


class TextSource(Source):
    """The texts of a split, as lists of them."""

    judgements: Judgements | None = None  #: of queries that have graded documents

    def inputs(self, rows: Tensor, following: Tensor | None = None, draw: Draw | None = None) -> list[str]:
        """The texts of these rows; nothing is augmented."""
        return [str(self.items.sources[row]) for row in rows.tolist()]

    def shown(self, row: int) -> dict[str, str]:
        """The beginning of the text."""
        return {"text": str(self.items.sources[row])[:300]}
