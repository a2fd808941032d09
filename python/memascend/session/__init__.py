"""One offloaded model: how its session is opened, its hooks, its budgets and checkpoints, and how it is closed.

A store stays when its program fails. `close` means that the run is done, so its files go; an uncaught exception, a
signal, or the end of the program without `close` means that it is not. Snapshots go only with `keep_store=False`. A
store that is in the way of a new run is refused.

Parameters alone do not keep a model open: reading one of a closed model is refused.
"""
