"""What ZeRO-3 with swapping holds and moves, from a model's and DeepSpeed's configuration; DeepSpeed is not needed."""
