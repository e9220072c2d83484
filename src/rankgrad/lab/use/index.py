"""An index of embeddings, and the nearest items of a query.

Two files: FAISS's index, which any program reads, and beside it ``NAME.json`` with the items' names and the
checkpoint that embedded them, so that queries are embedded by the same network.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from rankgrad.lab.training.checkpoint import write_bytes, write_text
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.run_files import read_json

#: With more items the index is a graph (HNSW): approximate, but a search does not visit every item.
EXACT_UP_TO = 200_000


@dataclass(frozen=True)
class Index:
    """Embeddings of unit length by cosine similarity.

    Attributes:
        found: FAISS's index.
        names: Of the items.
        checkpoint: Which embedded them.
        kind: What an item is: ``image`` or ``text``.
    """

    found: Any
    names: list[str]
    checkpoint: Path
    kind: str

    def nearest(self, embeddings: NDArray[np.float32], count: int) -> list[list[tuple[str, float]]]:
        """(name, cosine similarity) of the nearest items of each row, best first."""
        scores, rows = self.found.search(np.ascontiguousarray(embeddings, np.float32), min(count, len(self.names)))
        return [
            [(self.names[row], float(score)) for row, score in zip(*one, strict=True) if row >= 0]
            for one in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


class Notes(TypedDict):
    """What is noted beside an index."""

    checkpoint: str
    sha256: str  #: of the checkpoint
    index_sha256: str
    kind: Literal["image", "text"]
    names: list[str]


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path: Path, embeddings: NDArray[np.float32], names: list[str], checkpoint: Path, kind: str) -> None:
    """An index of these items: exact, or for very many a graph."""
    import faiss

    width = embeddings.shape[1]
    index: Any = faiss.IndexFlatIP(width)
    if len(names) > EXACT_UP_TO:
        index = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
    index.add(np.ascontiguousarray(embeddings, np.float32))
    content = faiss.serialize_index(index).tobytes()
    notes = {
        "checkpoint": str(checkpoint.resolve()),
        "sha256": _sha256(checkpoint),
        "index_sha256": hashlib.sha256(content).hexdigest(),
        "kind": kind,
        "names": names,
    }
    write_bytes(path, content)
    write_text(_beside(path), json.dumps(notes))


def read(path: Path) -> Index:
    """The index of a file, with what is noted beside it."""
    import faiss

    for one in (path, _beside(path)):
        if not one.is_file():
            found = f"found no file {str(one)!r}"
            raise UserError(f"INDEX: expected an index that `rankgrad embed --index FILE` wrote; {found}")
    notes: Notes = read_json(_beside(path), Notes)
    names, checkpoint = notes["names"], notes["checkpoint"]
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != notes["index_sha256"]:
        raise UserError(f"INDEX: {path} is damaged, or is not the index that {_beside(path)} is of")
    try:
        index = faiss.deserialize_index(np.frombuffer(content, np.uint8))
    except (ValueError, RuntimeError, MemoryError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise UserError(f"INDEX: {path} was not written by rankgrad embed, or is broken ({reason})") from None
    if index.ntotal != len(names):
        raise UserError(f"INDEX: {path} has {index.ntotal} embeddings, {_beside(path)} {len(names)} names")
    if not Path(checkpoint).is_file():
        raise UserError(f"INDEX: the network that embedded its items is gone: {checkpoint}")
    if _sha256(Path(checkpoint)) != notes["sha256"]:
        raise UserError(f"INDEX: {checkpoint} has changed since {path} was written; embed the items again")
    return Index(index, names, Path(checkpoint), notes["kind"])
