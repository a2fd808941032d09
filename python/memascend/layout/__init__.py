"""How a model's parameters are divided into units and laid out in bytes.

Weights and states are laid out per large parameter or pack, so a frozen parameter has no states and no second extent,
whichever parameters the user freezes after loading, and a step can leave out any parameter without a gradient.

A store is divided over ranks tensor by tensor (`shards`, `division`), in equal shares at multiples of the gradient
block, so that every sum of squares is one rank's and shares have whole records of 8-bit states. In a unit's buffer the
shares lie side by side, and a rank reads its own to where it belongs. Code that knows a tensor by its elements asks
`Place.stored` which of them the store has. A tensor of one block, or a pack, is rank 0's; the padding of the others is
never updated.
"""
