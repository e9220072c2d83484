"""Shared by all tests: a fixed seed, hypothesis profiles, and a run for the pages that load one."""

import sys

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # commands that set it must not change what the next test computes
    if "accelerate" in sys.modules:  # where an Accelerator exists, samplers leave the dividing to it
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def digits_run(tmp_path, monkeypatch):
    """The working folder has runs/digits, as ``rankgrad train digits`` leaves it, and two images."""
    from PIL import Image
    from sklearn.datasets import load_digits

    from rankgrad.lab.recipes import run

    monkeypatch.chdir(tmp_path)
    run.run("digits", ["epochs=1", "device=cpu"])
    for name, pixels in zip("ab", load_digits().images, strict=False):
        Image.fromarray((pixels * 15).astype("uint8")).save(f"{name}.png")
