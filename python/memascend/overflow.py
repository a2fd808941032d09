"""The overflow check of any tensors, as a public module: see `memascend.optim.overflow`."""

from memascend.optim.overflow import *  # noqa: F403
from memascend.optim.overflow import __all__ as __all__
