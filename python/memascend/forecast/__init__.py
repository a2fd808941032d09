"""What a run would take, from a model's configuration alone: its memory, its traffic, and the time of a step."""

from memascend.forecast.forecast import as_text, forecast

__all__ = ["as_text", "forecast"]
