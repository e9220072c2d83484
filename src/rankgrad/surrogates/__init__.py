"""Other methods' ways to differentiate a ranking, with the arguments of our losses, for fair comparison.

Each module is one method, written from its paper's definition and named after it. :data:`METHODS` lists them for
programs that go through all of them.
"""

from rankgrad.surrogates._methods import METHODS, Method
from rankgrad.surrogates.chen2019 import chen2019_loss
from rankgrad.surrogates.fastap import fastap_loss, fastap_rank
from rankgrad.surrogates.mohapatra2018 import mohapatra2018_loss
from rankgrad.surrogates.permutahedron import permutahedron_loss, permutahedron_rank
from rankgrad.surrogates.smoothap import smoothap_loss, smoothap_rank
from rankgrad.surrogates.sodeep import sodeep_loss, sodeep_rank
from rankgrad.surrogates.yue2007 import yue2007_loss

__all__ = [
    "METHODS",
    "Method",
    "chen2019_loss",
    "fastap_loss",
    "fastap_rank",
    "mohapatra2018_loss",
    "permutahedron_loss",
    "permutahedron_rank",
    "smoothap_loss",
    "smoothap_rank",
    "sodeep_loss",
    "sodeep_rank",
    "yue2007_loss",
]
