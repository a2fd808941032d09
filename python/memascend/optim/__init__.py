"""Optimizers whose states may live on SSD."""

from typing import Any

from memascend.optim.adam import Adam, AdamW
from memascend.optim.apollo import Apollo, ApolloMini, apollo_groups
from memascend.optim.base import OffloadedOptimizer
from memascend.optim.lion import Lion
from memascend.optim.sgd import SGD

__all__ = ["NAMED", "SGD", "Adam", "AdamW", "Apollo", "ApolloMini", "Lion", "OffloadedOptimizer", "apollo_groups"]

#: The optimizers of the command line: the class, its algorithm for `Rule`, and options that differ from the defaults;
#: `rank` is an option of `apollo_groups`.
NAMED: dict[str, tuple[type[OffloadedOptimizer], str, dict[str, Any]]] = {
    "adamw": (AdamW, "adamw", {}),
    "apollo": (Apollo, "apollo", {"rank": 256}),
    "apollo-mini": (ApolloMini, "apollo", {"rank": 1}),
    "lion": (Lion, "lion", {}),
    "sgd": (SGD, "sgd momentum", {"momentum": 0.9}),
}
