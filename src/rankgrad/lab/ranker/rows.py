"""What a file of any format holds: rows with a query, a grade and features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad.lab.training.reading import check_memory

#: No grade is larger: float32 holds 2^100, the gain of NDCG, and sums of it. (Linear gains do not need it: NDCG is
#: the same for all grades divided by a number.)
MOST = 100


@dataclass(frozen=True)
class Rows:
    """The rows of a file.

    Attributes:
        queries: ``[rows]``, which of ``ids`` a row belongs to.
        ids: The names of the queries, numbers or texts.
        grades: ``[rows]`` float64, from 0 to :data:`MOST`.
        features: ``[rows, features]``, dense or a SciPy matrix; finite.
        names: Of the features.
        sparse: Whether features that a file does not name are 0 (SVMlight), so that files may differ in them.
    """

    queries: NDArray[np.integer[Any]]
    ids: NDArray[Any]
    grades: NDArray[np.float64]
    features: Any
    names: list[str]
    sparse: bool

    def dense(self, columns: list[int]) -> NDArray[np.float32]:
        """Some features, as float32."""
        found = self.features[:, columns]
        return np.asarray(found.toarray() if self.sparse else found, dtype=np.float32)


def check_dense(path: Path, rows: int, features: int) -> None:
    """Refuse a table that is out of proportion to its file: SVMlight names features by numbers, 9:1 9999999:1."""
    needed = (8 * rows + 1024) * features  # two copies, the names, a layer of a small network
    check_memory(needed, str(path), f"{rows:,} rows of {features:,} dense features", path.stat().st_size)


def wrong_grade(grade: float) -> str | None:
    """What is wrong with a grade, if anything is."""
    if not np.isfinite(grade):
        return f"expected a grade, received {grade}"
    return None if 0 <= grade <= MOST else f"expected a grade from 0 to {MOST}, received {grade:g}"
