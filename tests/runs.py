"""What the tests of the command share: calling it, a run's tables and weights, and how to break one off."""

import csv

import pytest
import torch

from rankgrad.lab.cli import main
from rankgrad.lab.training import checkpoint
from rankgrad.lab.training.loop import Trainer


def cli(*arguments):
    """The exit code of a command; a message is its own code."""
    with pytest.raises(SystemExit) as caught:
        main([str(one) for one in arguments])
    return caught.value.code


def message_of(*arguments):
    """The message of a command that fails: one line."""
    message = cli(*arguments)
    assert isinstance(message, str) and message.startswith("rankgrad: ") and "\n" not in message, message
    return message


def rows(folder, name="steps"):
    with (folder / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def weights_of(path):
    return checkpoint.load_weights(path)[0]


def same_weights(a, b):
    a, b = weights_of(a), weights_of(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_after(monkeypatch, steps):
    """Break the loop as a kill would, right after a number of steps."""
    inner = Trainer._train_step
    left = [steps]

    def one(self, network):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        inner(self, network)

    monkeypatch.setattr(Trainer, "_train_step", one)


def with_removed(settings):
    """Settings of a detector as 0.2 saved them before its release, with those that were removed since, all off."""
    loss, boxes = {"thresholds": False, "order_weight": 0.0}, {"by_score": False, "balanced": False}
    return {**settings, "loss": {**settings["loss"], **loss}, "boxes": {**settings["boxes"], **boxes}}
