"""Memory and traffic of ZeRO-3 with swapping, from a model's and DeepSpeed's configuration, without DeepSpeed."""
