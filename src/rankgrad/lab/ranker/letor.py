"""SVMlight text with query numbers, the format of LETOR, MSLR and Istella: ``2 qid:10 1:0.03 2:0.5 # comment``."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np

from rankgrad.lab.ranker.rows import MOST, Rows, check_dense, wrong_grade
from rankgrad.lab.training.errors import UserError

SUFFIXES = (".txt", ".svm", ".svmlight", ".libsvm", ".letor", ".dat")


def read(path: Path) -> Rows:
    """The rows of a file. An error names its line."""
    from sklearn.datasets import load_svmlight_file

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Numbers of features as they are: LETOR counts from 1, others from 0, and files of a set must agree.
            features, grades, queries = load_svmlight_file(str(path), query_id=True, zero_based=True)
    except (ValueError, OverflowError, Warning) as error:
        raise _fault(path) or UserError(f"{path}: expected SVMlight text with qid ({error})") from None
    regular = len(queries) == len(grades) and bool(np.isfinite(grades).all() and np.isfinite(features.data).all())
    if not regular or not bool(((grades >= 0) & (grades <= MOST)).all()):
        raise _fault(path) or UserError(f"{path}: expected a qid in every line")
    used = np.unique(features.indices)
    width = features.shape[1] - int(used.min()) if len(used) else 0
    check_dense(path, len(grades), width)
    names = [str(number) for number in range(int(used.min()), features.shape[1])] if len(used) else []
    first = int(used.min()) if len(used) else 0
    ids, queries = np.unique(queries, return_inverse=True)
    return Rows(queries, ids, grades, features[:, first:].tocsc(), names, sparse=True)


def _fault(path: Path) -> UserError | None:
    """Find the first line that is wrong: scikit-learn's reader says only that there is one."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            words = raw.partition(b"#")[0].decode("utf-8", "replace").split()
            if words and (fault := _wrong(words)):
                return UserError(f"{path}, line {number}: {fault}")
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _wrong(words: list[str]) -> str | None:
    """What is wrong with a line."""
    grade = _number(words[0])
    if grade is None:
        return f"expected a grade, received {words[0][:40]!r}"
    if fault := wrong_grade(grade):
        return fault
    if len(words) < 2 or not words[1].startswith("qid:") or not words[1][4:].lstrip("-").isdecimal():
        received = words[1][:40] if len(words) > 1 else ""
        return f"expected qid:NUMBER after the grade, received {received!r}"
    before = -1
    for word in words[2:]:
        index, colon, text = word.partition(":")
        value = _number(text)
        if not colon or not index.isdecimal() or value is None:
            return f"expected FEATURE:VALUE, received {word[:40]!r}"
        if not math.isfinite(value):
            return f"expected a finite value of feature {index}, received {text!r}"
        if int(index) <= before:
            return f"expected features in ascending order, received {index} after {before}"
        before = int(index)
    return None
