"""How a model's parameters are divided into units and laid out in bytes.

Weights and states are laid out per large parameter or pack, so a frozen parameter has no states and no second extent,
whichever parameters the user freezes after loading, and a step can leave out any parameter without a gradient.

A store is divided over ranks tensor by tensor (`shards`, `division`), in equal shares at multiples of the gradient
block, so that one rank computes each sum of squares and shares hold whole records of 8-bit states. In a unit's buffer
the shares lie side by side, and a rank reads its own into its range. `ParameterEntry.stored` says which elements of a
parameter the store has. Rank 0 has a tensor of one block or a pack as a whole; the padding of the others is never
updated.
"""
