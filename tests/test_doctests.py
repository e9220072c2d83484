"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import rankgrad

MODULES = [m.name for m in pkgutil.walk_packages(rankgrad.__path__, "rankgrad.") if "_kernels" not in m.name]


@pytest.mark.parametrize("name", ["rankgrad", *MODULES])
def test_docstring_examples(name):
    torch.manual_seed(0)
    result = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"torch": torch, "rankgrad": rankgrad},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(found) >= 8
