"""How a model's parameters are divided into units and laid out in bytes."""
