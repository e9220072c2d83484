"""Train a sorting network for the SoDeep baseline, and keep it as a file: ``rankgrad sodeep train``."""

from rankgrad.lab.sodeep.files import load, save
from rankgrad.lab.sodeep.training import synthetic_lists, train

__all__ = ["load", "save", "synthetic_lists", "train"]
