"""The kinds of bytes on the SSD: of a forecast, and of the page on a run."""

#: Kinds of bytes on the SSD, in the order of the tables.
KINDS = {
    "weights": "weights",
    "master": "masters",
    "master_low": "master low halves",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "moments": "moments of projected gradients",
    "gradients": "gradients",
    "projections": "projected gradients",
    "activations": "activations of recomputed layers",
    "second_slot": "second slot of weights and states",
    "kept": "best model and checkpoints",
    "buffers": "buffers",
}
