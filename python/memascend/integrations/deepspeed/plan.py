"""The plan of host memory, under the name by which this package uses it.

It lies in `memascend.forecast`, where it can be imported without DeepSpeed.
"""

from memascend.forecast.deepspeed.plan import CHUNK, SLOTS, Decision, Line, Shapes, decide, lines, pool_bytes, table

__all__ = ["CHUNK", "SLOTS", "Decision", "Line", "Shapes", "decide", "lines", "pool_bytes", "table"]
