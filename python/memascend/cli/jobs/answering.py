"""`memascend generate` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.cli.answers.chat import chat as talk
from memascend.cli.answers.generate import GenerateOptions
from memascend.cli.answers.generate import generate as answer
from memascend.cli.console import quiet_libraries
from memascend.common.interrupts import Interrupts
from memascend.hardware.matmul_rates import warn_no_more

if TYPE_CHECKING:
    import argparse


def generate(chosen: argparse.Namespace) -> int:
    """Answer a file of prompts."""
    with Interrupts():  # SIGTERM too leaves nothing behind
        answer(_asked(chosen), chosen.prompts, chosen.out, chosen.batch_size)
    return 0


def chat(chosen: argparse.Namespace) -> int:
    """Answer typed lines."""
    with Interrupts():
        talk(_asked(chosen), chosen.context)
    return 0


def _asked(chosen: argparse.Namespace) -> GenerateOptions:
    quiet_libraries()
    warn_no_more()
    return GenerateOptions(
        model=chosen.model,
        host_memory=chosen.host_memory,
        store=chosen.store,
        tokenizer=chosen.tokenizer,
        as_bytes=chosen.bytes,
        new_tokens=chosen.max_new_tokens,
        temperature=chosen.temperature,
        seed=chosen.seed,
        raw=chosen.raw,
        experts=chosen.experts,
        base_bits=chosen.base_bits,
    )
