"""The entry of `Optimizer.state` for a parameter whose states are on a store: numbers, and no tensors."""

from __future__ import annotations

from typing import Any, NoReturn

from memascend.errors import MemascendError

#: The keys of an entry: the number of steps, and the norm with which APOLLO's limiter compares the next one. Of experts
#: each one's number of steps too, and a norm for each.
NUMBERS = frozenset({"step", "steps", "norm"})


class StoredState(dict[str, Any]):
    """The entry of one parameter. A state that is asked for or assigned is refused, as it would not be the store's.

    Where a program deletes, replaces or clears the entry, the parameter begins anew with its next step, as in memory.
    """

    __slots__ = ("cleared", "name")

    def __init__(self, name: str, numbers: dict[str, Any]) -> None:
        """Be the entry of the parameter `name`."""
        super().__init__(numbers)
        self.name = name
        #: Whether the program has discarded all states, and not just the number of steps.
        self.cleared = False

    def clear(self) -> None:
        """Discard all states."""
        self.cleared = True
        super().clear()

    def __missing__(self, key: str) -> NoReturn:
        raise MemascendError(
            f"{key} of {self.name} is on the store, not in Optimizer.state: read it from optimizer.state_dict(), and "
            "write it by load_state_dict(). del optimizer.state[parameter] has the parameter begin anew"
        )

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in NUMBERS:
            self.__missing__(key)
        super().__setitem__(key, value)

    def update(self, *others: Any, **named: Any) -> None:
        """Assign each item."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __ior__(self, other: Any) -> StoredState:  # type: ignore[override, misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an item, which is assigned first where there is none."""
        if key not in self:
            self[key] = default
        return self[key]
