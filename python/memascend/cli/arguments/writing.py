"""The options of the subcommands that write models or stores: `export`, `merge` and `reshard`."""

from __future__ import annotations

from typing import Any

from memascend.cli.arguments.parsing import subcommand
from memascend.cli.arguments.values import QUANTISED, WEIGHTS_DTYPES, path, ranks, size, weights_dtype


def add_export(subcommands: Any) -> None:
    """Add the subcommand `export`."""
    parser = subcommand(
        subcommands,
        "export",
        help="write a model in formats of other programs: Hugging Face, GGUF for llama.cpp and Ollama, PyTorch, NF4",
        description="Write the model in a store, with its optimizer's states, in formats of other programs, in\n"
        "bounded memory; or the model of some adapters with these merged; or a model directory as GGUF or NF4.\n"
        "OUT must not exist.",
    )
    add = parser.add_argument
    text = (
        "a directory or raw device of a store; the store's others are found from there. Or a directory of adapters "
        "that `memascend finetune --lora-rank` or PEFT wrote, or, with --format gguf or nf4, a model directory"
    )
    add("store", type=path, nargs="+", metavar="SOURCE", help=text)
    add("--out", type=path, required=True, metavar="OUT", help="the directory to write; must not exist yet")
    text = (
        "huggingface: a model directory; gguf: model.gguf for llama.cpp with its tokenizer, and a Modelfile for "
        "Ollama; torch: a model directory, and optimizer.pt for torch.load; distributed: a checkpoint of "
        "torch.distributed.checkpoint with both; nf4: a model directory whose linear weights are in 4 bits, "
        "as bitsandbytes has them, which any number of runs of adapters read in place (default: %(default)s)"
    )
    add("--format", choices=("huggingface", "gguf", "torch", "distributed", "nf4"), default="huggingface", help=text)
    text = (
        "of the weights written (default: as they are); q8_0 with --format gguf alone. llama-quantize of llama.cpp "
        "makes files of other types, such as q4_k_m, from one in bfloat16 or float16"
    )
    add("--dtype", type=weights_dtype, metavar="|".join(WEIGHTS_DTYPES), help=text)
    text = "where the tokenizer is (default: in the model directory that the run was made from, if it is still there)"
    add("--tokenizer", type=path, metavar="DIR", help=text)
    add("--host-memory", type=size, metavar="SIZE", help="the most host memory to use (default: the least that works)")


def add_merge(subcommands: Any) -> None:
    """Add the subcommand `merge`."""
    parser = subcommand(
        subcommands,
        "merge",
        help="write the model of some adapters with these merged into its weights",
        description="Merge adapters into the model that they belong to, layer by layer in bounded memory, and write\n"
        "the result as a model directory in the model's own dtype. OUT must not exist.",
    )
    add = parser.add_argument
    text = "a directory of adapters that `memascend finetune --lora-rank` or PEFT wrote, which names its model"
    add("adapter", type=path, metavar="ADAPTER", help=text)
    text = "the directory to write; must not exist yet. While it is written, a copy of the weights lies beside it"
    add("--out", type=path, required=True, metavar="OUT", help=text)
    dtypes = [name for name in WEIGHTS_DTYPES if name != QUANTISED]
    add("--dtype", choices=dtypes, help="of the weights written (default: as they are)")
    text = "where the tokenizer is (default: with the adapters, or with their model)"
    add("--tokenizer", type=path, metavar="DIR", help=text)
    add("--host-memory", type=size, metavar="SIZE", help="the most host memory to use (default: the least that works)")


def add_reshard(subcommands: Any) -> None:
    """Add the subcommand `reshard`."""
    parser = subcommand(
        subcommands,
        "reshard",
        help="write the stores of a run anew for another number of processes",
        description="Write the stores of a run of several processes, or of one, anew for another number of them, with\n"
        "little memory. The run goes on from there with memascend.resume. Its stores stay as they are;\n"
        "checkpoints are not copied. All stores are to be on this machine.",
    )
    add = parser.add_argument
    text = "the run's stores: each in its order, or with {rank} for its number, such as '/nvme{rank}/run'; or one store"
    add("store", type=path, nargs="+", metavar="STORE", help=text)
    add("--ranks", type=ranks, required=True, metavar="N", help="how many processes the run is to have")
    text = "directories for the new stores, one for each or with {rank} for its number; none may exist, unless empty"
    add("--to", type=path, nargs="+", required=True, metavar="NEW", help=text)
