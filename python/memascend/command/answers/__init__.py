"""Answers of a model: of one in a store, of adapters or of a directory, streamed within a budget."""
