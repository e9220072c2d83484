"""Random lists for property tests: few distinct values (ties), infinities, masks, all shapes."""

import numpy as np
from hypothesis import strategies as st

from rankgrad.engine.forms import FORMS

#: Scores on a coarse grid tie often; the margins used below are multiples of it, so they tie after the shift too.
GRID = [-2.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 1.0, 3.0]


@st.composite
def lists(draw, max_lists=4, max_items=9, infinities=False, masked=True):
    """``(scores, relevance, mask)`` matrices; mask may be None."""
    rows, n = draw(st.integers(1, max_lists)), draw(st.integers(1, max_items))
    grid = [*GRID, np.inf, -np.inf] if infinities else GRID
    value = st.one_of(st.sampled_from(grid), st.floats(-2, 2, width=16))
    scores = np.array(draw(st.lists(value, min_size=rows * n, max_size=rows * n)), dtype=np.float64)
    flags = st.lists(st.booleans(), min_size=rows * n, max_size=rows * n)
    relevance = np.array(draw(flags), dtype=bool).reshape(rows, n)
    mask = None
    if masked and draw(st.booleans()):
        mask = np.array(draw(flags), dtype=bool).reshape(rows, n)
    return scores.reshape(rows, n), relevance, mask


lams = st.sampled_from([0.01, 0.2, 1.0, 4.0])
margins = st.sampled_from([0.0, 0.25, 0.5, 1.0])
forms = st.sampled_from([name for name in FORMS if name != "tables"])
