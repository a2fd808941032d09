"""The needs of a run, from a model's configuration alone: its memory, its traffic, and the time of a step."""
