"""Imports slow modules, for the processes that others are forked from (forked.py), and for nothing else."""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings

import float32_products

MODULES = [
    "torch",
    "torch._dynamo",
    "torch.distributed._local_tensor",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.registry",
    "safetensors.torch",
    "transformers",
    "transformers.generation",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.t5.modeling_t5",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gemma", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    ),
    "memascend.cli.main",
    "memascend.cli.finetune",
    "rank_programs",
    "launched_programs",
]

gc.disable()  # collections would look at a growing number of objects, of which almost all stay
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES:
        # Modules that are not installed are not tested either.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

# Programs multiply as the tests do that compare with them.
float32_products.install()

# No collection of a forked process looks at, and so copies, present objects.
gc.enable()
gc.collect()
gc.freeze()
