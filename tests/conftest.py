"""Shared by all tests: a fixed seed, hypothesis profiles, and inputs that are rarely kind."""

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
