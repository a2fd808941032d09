"""Optimizers whose states may live on SSD."""

from typing import Any

from memascend.optim.adam import Adam, AdamW
from memascend.optim.apollo import Apollo, ApolloMini, apollo_groups
from memascend.optim.base import OffloadedOptimizer as OffloadedOptimizer
from memascend.optim.lion import Lion
from memascend.optim.sgd import SGD
from memascend.optimizers import OPTIMIZERS

#: The names that `import memascend` has, too.
__all__ = ["SGD", "Adam", "AdamW", "Apollo", "ApolloMini", "Lion", "apollo_groups"]

#: The optimizers of the command line: class, algorithm, and options as in `memascend.optimizers`.
NAMED: dict[str, tuple[type[OffloadedOptimizer], str, dict[str, Any]]] = {
    name: (globals()[one.class_name], one.algorithm, one.options) for name, one in OPTIMIZERS.items()
}
