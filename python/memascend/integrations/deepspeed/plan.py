"""The plan of host memory, under the name by which this package uses it.

It lies in `memascend.forecast`, where it can be imported without DeepSpeed.
"""

from memascend.forecast.deepspeed.plan import CHUNK, SLOTS, Line, Shapes, decide, lines, table

__all__ = ["CHUNK", "SLOTS", "Line", "Shapes", "decide", "lines", "table"]
