"""SoDeep: a network trained to sort replaces the ranking.

M. Engilberge, L. Chevallier, P. Perez, M. Cord: SoDeep: a sorting deep net to learn ranking loss surrogates,
CVPR 2019. A network learns, on synthetic lists, to give the ranks of a list of scores; frozen, it replaces the
ranking in any rank-based loss. :mod:`rankgrad.lab.sodeep` trains one (``rankgrad sodeep train``).

Our choices where the paper leaves them open: a sorter is made for lists of up to ``length`` items and gets
shorter ones filled up at the end with a value below all others, so that items that do not exist are as good as
removed; it gives rank / length; the CNN reads the whole list (its last layer is dense).
"""

from rankgrad.surrogates.sodeep.networks import CNNSorter, LSTMSorter, Sorter
from rankgrad.surrogates.sodeep.ranking import sodeep_loss, sodeep_rank

__all__ = ["CNNSorter", "LSTMSorter", "Sorter", "sodeep_loss", "sodeep_rank"]
