"""Which units are in memory, which are on their way, and which are evicted.

`streamer.Streamer` begins and ends the uses of units. Its parts, in the order of a unit's way: `order` predicts the
uses, `prefetch` fetches ahead, `demand` says which buffer is needed last, `cache` has the buffers of host memory and
fetches into them, `device_cache` copies units to a device, and `gather` completes them over ranks. `deferred_updates`
and `in_backward` hand updates to units, `program_writes` takes writes of the program, and `table_reads`, `table_copies`
and `blocks` read tables by blocks of rows.

A use of a unit, in host memory or on a device, ends with the last storage over its buffer. The block of a table is the
exception: its tensor is emptied when the next block is asked for, or the reader fails, so that the traceback of an
error holds no buffer.

A unit with a buffer of its own keeps it across steps (`Plan.resident_units`): it is updated in place, and the store
reads it from there. The store is told when such a unit is evicted.

On a device, the events that the next upload waits for are recorded when the last tensor over a buffer dies, right after
the layer's kernels were launched. Recorded when the buffer is needed again, they would put the upload behind the
computation that it is meant to overlap. A lease of host memory returns when the copy out of it is done; a unit that
finds no buffer waits for the oldest copy. Nothing else in a pass waits for the device, except gradients and inputs
beyond their line of the plan.

Another budget of device memory means other buffers: between two passes all are given back, PyTorch's cache is emptied
and the new plan's are reserved. Before that the host waits for the copies and the computation that use them,
because PyTorch orders the memory's next use after its own stream only. CUDA's virtual memory functions would give
nothing but the copies of one pass: no address outlives a pass, except in tensors of the program, for which the change
is refused.

Over ranks, each rank fetches ahead for itself, since that depends on drives, budgets and when a read ends. So the
shares of the other ranks are gathered when a use begins, even if the buffer still has them from an earlier use, and
the order of collectives is the program's. A unit in use, and the last one used, stay complete; the latter until a step
or a flush, which may need its buffer on one rank and not on another.

Rows of a table are looked up in host memory even if the table has a buffer on the device, as long as it is not there: a
pass that begins with a lookup would otherwise begin with a copy of the table.
"""
