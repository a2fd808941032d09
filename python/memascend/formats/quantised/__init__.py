"""Quantised weights as they are published: which form a directory has, and its values in floating point.

`forms` says which form a directory has, and refuses others by name. `reading` presents the stored tensors as one
dequantised tensor, so that nothing above knows of forms. Each form is a file that repeats the operations of its library
in PyTorch, on some rows at a time: the library is not needed, and tests compare with it. Numbers of one byte that no
form accounts for are refused: FP8 without its scales is floating point too, of other weights. Some forms are read in
place (`Packed.in_place`): there the executor dequantises.
"""
