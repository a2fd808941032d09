"""Recipes of `memascend finetune --task` that a trainer of TRL or transformers carries out, over an offloaded model."""
