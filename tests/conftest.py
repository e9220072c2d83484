"""Shared by all tests: a fixed seed, hypothesis profiles, and inputs that are rarely kind."""

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
