"""The command line.

The loop is transformers' Trainer (`loop`, `training`). Our parts are those that it does not have: the order of the data
(a sequence for each index of the whole run, so that a change of batch size goes on where the data was), a step left out
for a loss that is not finite, a metrics file that does not grow in memory, the best model as a checkpoint of the store,
and a run that goes on with other options. The loss on held-out data is summed over tokens, since the Trainer's mean
over batches depends on which sequences are in one. Only commands that train import the Trainer, which takes seconds and
0.3 GB.

Launched in several processes, the first one prints for all (`distributed`); an error is printed by the first process
that has it. Each process reads all data, and the Trainer gives it every N-th batch. What a signal, a loss or an
evaluation decides is agreed on before it is acted on, since a signal reaches one process in one step and another in the
next.

Data is not read by `datasets`, whose map-style path takes a hundred times the memory (`benches/data.py`), and whose
streams tell no places, by which documents are shuffled and errors named; the conventions are its and TRL's.
"""
