"""Answers of a model: of one in a store, of adapters or of a directory, streamed within a budget.

The loop over tokens is transformers' `generate`, whose every pass is one of the whole offloaded model, so what a pass
reads serves all sequences of a batch. Keys and values are PyTorch's memory; the command takes them off the budget
before the model is planned.
"""
