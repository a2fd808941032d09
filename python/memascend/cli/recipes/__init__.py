"""Recipes of `memascend finetune --task` that a trainer of another library carries out, over an offloaded model."""
