"""The CUDA source and its launcher. Nothing here knows of a model."""
