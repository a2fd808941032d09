"""What a run would take, from a model's configuration alone: its memory, its traffic, and the time of a step."""
