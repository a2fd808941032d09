"""The state of a step beside weights and optimizer states, which the next batch and the next pass change.

It is taken whether or not the step is due to be durable, as long as the store may be kept, because a commit in between
(`close`, `flush`, a checkpoint) records it. Where the program has written weights since the pass began there is no step
to record: `close` commits nothing, and names the step that stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class StepSnapshot:
    """The random numbers, data, buffers and tracked objects of a step.

    Random numbers and data are taken when the step is taken, since the next batch changes them. Buffers and tracked
    objects are taken when the next pass begins, after the program, schedulers and scalers have followed the step.
    """

    #: The result of `memascend.durability.record.random_states`.
    random: dict[str, Any]
    #: The state of the data as `exact_json.encode` returns it, None if none is tracked.
    data: Any
    #: The result of `ModelBuffers.changed`: None where the store has the buffers.
    buffers: dict[str, Any] | None
    #: Whether a pass has begun since: from then on nothing here changes.
    passed: bool = False
    #: The states of all tracked objects as `exact_json.encode` returns them, once a pass has begun.
    tracked: dict[str, Any] | None = None
