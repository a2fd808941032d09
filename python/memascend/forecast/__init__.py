"""What a run would take, from a model's configuration alone."""

from memascend.forecast.forecast import as_text, forecast

__all__ = ["as_text", "forecast"]
