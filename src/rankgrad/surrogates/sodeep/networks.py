"""The two networks that learn to sort."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankgrad import _check

#: The values that fill up a short list lie this far below its least score.
_GAP = 1.0


def filled(scores: Tensor, here: Tensor) -> Tensor:
    """``[lists, length]`` scores with a value below all of their list wherever no item is ``here``."""
    least = scores.detach().where(here, torch.inf).amin(-1, keepdim=True)
    return torch.where(here, scores, least.where(least.isfinite(), 0) - _GAP)


class LSTMSorter(nn.Module):
    """The paper's sorter: a bidirectional LSTM over the list, and a projection of its states to one rank each.

    Args:
        length: The longest list.
        hidden: Units in each direction.
        layers: Stacked LSTMs.
    """

    def __init__(self, length: int, hidden: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.length = _check.count("length", length, at_least=1)
        self.hidden = _check.count("hidden", hidden, at_least=1)
        self.layers = _check.count("layers", layers, at_least=1)
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True, bidirectional=True)
        self.projection = nn.Linear(2 * hidden, 1)
        nn.init.constant_(self.projection.bias, 0.5)  # begin at the mean rank

    def forward(self, scores: Tensor) -> Tensor:
        """``[lists, length]`` scores -> rank / length."""
        states, _ = self.lstm(scores.unsqueeze(-1))
        out: Tensor = self.projection(states).squeeze(-1)
        return out


class CNNSorter(nn.Module):
    """The convolutional variant: convolutions over the list, then one dense layer to all ranks.

    Args:
        length: The longest list.
        hidden: Channels.
        layers: Convolutions of width 3.
    """

    def __init__(self, length: int, hidden: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.length = _check.count("length", length, at_least=1)
        self.hidden = _check.count("hidden", hidden, at_least=1)
        self.layers = _check.count("layers", layers, at_least=1)
        channels = [1] + [hidden] * layers
        self.convolutions = nn.ModuleList(
            nn.Conv1d(inside, outside, 3, padding=1) for inside, outside in itertools.pairwise(channels)
        )
        self.mix = nn.Linear(hidden * length, 8 * length)
        self.projection = nn.Linear(8 * length, length)
        nn.init.constant_(self.projection.bias, 0.5)  # begin at the mean rank

    def forward(self, scores: Tensor) -> Tensor:
        """``[lists, length]`` scores -> rank / length."""
        features = scores.unsqueeze(1)
        for convolution in self.convolutions:
            features = F.relu(convolution(features))
        out: Tensor = self.projection(F.relu(self.mix(features.flatten(1))))
        return out


Sorter = LSTMSorter | CNNSorter
ARCHITECTURES: dict[str, type[LSTMSorter] | type[CNNSorter]] = {"lstm": LSTMSorter, "cnn": CNNSorter}
