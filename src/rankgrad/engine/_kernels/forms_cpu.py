"""The forms of :mod:`rankgrad.engine.forms` for Numba, numbered as there."""

# mypy: ignore-errors
import numba
import numpy as np

AP, LOG_AP, LOG, LOGLOG, TABLES = range(5)


@numba.njit(inline="always", error_model="numpy")
def value_of(form, tables, above, own):
    """What a relevant item adds to its list's loss."""
    c = float(above)
    if form == AP:
        return c / (own + c)
    if form == LOG_AP:
        return np.log((own + c) / own)
    if form == LOG:
        return np.log(1 + c)
    if form == LOGLOG:
        return np.log(1 + np.log(1 + c))
    return tables[0, min(above, tables.shape[1] - 1)]


@numba.njit(inline="always", error_model="numpy")
def slope_of(form, tables, above, own):
    """d(that) / d(rank)."""
    c = float(above)
    rank = own + c
    if form == AP:
        return own / (rank * rank)
    if form == LOG_AP:
        return 1 / rank
    if form == LOG:
        return 1 / (1 + c)
    if form == LOGLOG:
        return 1 / ((1 + c) * (1 + np.log(1 + c)))
    return tables[1, min(above, tables.shape[1] - 1)]
