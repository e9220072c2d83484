"""The forms of a list's loss, one table: name, formula, and value and slope of a relevant item in float64 torch.

Every form exists once more for Numba (``_kernels.forms_cpu``) and once for Triton (``_kernels.forms_gpu``),
numbered as here; the tests find forms in this table and hold those against it.

``above`` (c) is the number of irrelevant items at or above a relevant item, ``own`` (r+) its rank among the
relevant items. A list's loss is the mean of the values over its p relevant items, its slope at each of them slope
/ p.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Terms = tuple[Tensor, Tensor]


class Form(NamedTuple):
    """What a relevant item adds to its list's loss, and d(that)/d(rank) with r+ held constant."""

    value: str
    slope: str
    terms: Callable[[Tensor, Tensor, Tensor | None], Terms]


def _ap(above: Tensor, own: Tensor, tables: Tensor | None) -> Terms:
    rank = own + above
    return above / rank, own / (rank * rank)


def _log_ap(above: Tensor, own: Tensor, tables: Tensor | None) -> Terms:
    rank = own + above
    return torch.log(rank / own), 1 / rank


def _log(above: Tensor, own: Tensor, tables: Tensor | None) -> Terms:
    return torch.log(1 + above), 1 / (1 + above)


def _loglog(above: Tensor, own: Tensor, tables: Tensor | None) -> Terms:
    inner = torch.log(1 + above)
    return torch.log(1 + inner), 1 / ((1 + above) * (1 + inner))


def _tables(above: Tensor, own: Tensor, tables: Tensor | None) -> Terms:
    assert tables is not None
    at = above.long().clamp(max=tables.shape[1] - 1)
    return tables[0][at], tables[1][at]


FORMS = {
    "ap": Form("1 - r+ / r", "r+ / r^2", _ap),
    "log_ap": Form("log(r / r+)", "1 / r", _log_ap),
    "log": Form("log(1 + c)", "1 / (1 + c)", _log),
    "loglog": Form("log(1 + log(1 + c))", "1 / ((1 + c) (1 + log(1 + c)))", _loglog),
    "tables": Form("W(c)", "W'(c)", _tables),
}
_CODES = {name: number for number, name in enumerate(FORMS)}


def code(form: str) -> int:
    """The number of a form in the kernels."""
    return _CODES[form]


def terms(form: str, tables: Tensor | None, above: Tensor, own: Tensor) -> Terms:
    """Value and slope of relevant items, float64, in the shape of ``above``."""
    return FORMS[form].terms(above.double(), own.double(), tables)


def weight_tables(weights: Tensor) -> Tensor:
    """W(c) = w_1 + ... + w_c and w_c for c = 0 ... K + 1, float64 ``[2, K + 2]``.

    There is nothing to pass at 0, and nothing more to gain beyond the end.
    """
    zero = weights.new_zeros(1, dtype=torch.float64)
    steps = torch.cat([zero, weights.double(), zero])
    return torch.stack([steps.cumsum(0), steps])
