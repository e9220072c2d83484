"""Public names: each has an example in its docstring, and names the shapes of the tensors it takes."""

import importlib
import inspect
import re

import pytest

#: The modules whose ``__all__`` is public; those of integrations need their package.
MODULES = (
    "rankgrad",
    "rankgrad.metrics",
    "rankgrad.surrogates",
    "rankgrad.detection",
    "rankgrad.samplers",
    "rankgrad.integrations.pytorch_metric_learning",
    "rankgrad.integrations.sentence_transformers",
    "rankgrad.integrations.torchmetrics",
)
NEEDS = {name: name.rpartition(".")[2] for name in MODULES if ".integrations." in name}
METHODS = ("forward", "update", "push", "at")


def public(name):
    """The public functions and classes of a module."""
    module = importlib.import_module(name)
    named = getattr(module, "__all__", None) or [
        one for one, value in vars(module).items() if getattr(value, "__module__", "") == name and one[0] != "_"
    ]
    return {one: getattr(module, one) for one in named if callable(getattr(module, one))}


def takes_tensors(value):
    """Whether a function, or a class by one of its methods, is annotated to take tensors."""
    called = [value, *(getattr(value, name) for name in METHODS if hasattr(value, name))]
    return any("Tensor" in str(one.annotation) for each in called for one in _parameters(each))


def _parameters(value):
    try:
        return inspect.signature(value).parameters.values()
    except ValueError:
        return ()


def documentation(value):
    """Docstrings of a public name and of its methods that take tensors."""
    own = [inspect.getdoc(getattr(value, name)) or "" for name in METHODS if hasattr(value, name)]
    return "\n".join([inspect.getdoc(value) or "", *(own if inspect.isclass(value) else [])])


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_an_example_and_shapes(module):
    if module in NEEDS:
        pytest.importorskip(NEEDS[module])
    found = public(module)
    assert found
    faults = [f"{name}: no example" for name, value in found.items() if ">>>" not in (inspect.getdoc(value) or "")]
    faults += [
        f"{name}: no shape"
        for name, value in found.items()
        if takes_tensors(value) and not re.search(r"``\[[^\]]*\]", documentation(value))
    ]
    assert faults == []


def test_a_name_without_example_or_shape_is_found():
    def bare(scores: "Tensor"):  # noqa: F821
        """No example here."""

    assert takes_tensors(bare) and ">>>" not in documentation(bare)
    assert not re.search(r"``\[[^\]]*\]", documentation(bare))
