"""One data set dealt out to clients: which samples, and which objectives, each of them holds.

Every partition is a list of index arrays, one per client: disjoint, together all of `range(n)`, and
a function of its arguments and `seed` alone. The indices of a client are in ascending order.

>>> parts = label_shards([0, 0, 0, 0, 1, 1, 2, 2], clients=4, labels_per_client=2)
>>> [len(part) for part in parts]
[2, 2, 2, 2]
"""

from fmol.partition.assignment import all_objectives, make_clients, one_each, random_subsets
from fmol.partition.columns import Indices, Labels
from fmol.partition.description import Description, describe
from fmol.partition.samples import blocks, by_group, dirichlet, iid
from fmol.partition.shards import label_shards

__all__ = [
    "Description",
    "Indices",
    "Labels",
    "all_objectives",
    "blocks",
    "by_group",
    "describe",
    "dirichlet",
    "iid",
    "label_shards",
    "make_clients",
    "one_each",
    "random_subsets",
]
