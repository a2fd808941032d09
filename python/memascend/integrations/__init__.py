"""Other libraries' training loops over offloaded models: one module for each library.

A checkpoint is a snapshot in the store and a directory that names it (`named_checkpoints`, for all three loops): it
holds the parts in memory, and in `memascend_checkpoint.json` for each model where its store is, and the name there.
Over processes the first one has the Trainer's directories; Accelerate's are seen by all.

Accelerate and Lightning save and load all that is in memory by their own hooks. Going back makes new optimizers: the
library's wrappers and schedulers are pointed at them. Launched in several processes, an offloaded model is divided over
them; it is prepared as one to evaluate, which accelerate wraps in nothing (`launches`). A LightningModule that is
offloaded runs each of its steps as one pass (`Hooks.as_pass`), since Lightning calls `training_step` and not its
forward.

A durable step is recorded before its figures are logged, the model evaluated and a checkpoint saved, so a Trainer's run
that is resumed there first does the rest of that step's work (`trainer_position`).

`deepspeed` is memascend inside another program's step, without an offloaded model. Methods are replaced one by one, by
name, and only where digests know their code (`deepspeed.versions`): a method of another version would do its work
twice, or not at all. Each part needs those before it, so with unknown code the parts before the first that needs it are
in force.
"""
