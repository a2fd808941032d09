"""Every architecture that transformers' auto classes list: small, offloaded, it computes the bits of the run in memory.

So it does where its embeddings and heads are tables, beside `memascend.fuse_loss` in memory.

`architectures.json` lists those that do not get that far, with the reasons. It is true: an entry that begins to work
makes its test fail, and so does another that stops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import architecture_runs
import architecture_slices
import faults
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

if TYPE_CHECKING:
    from architecture_tables import Seen

LISTED = json.loads(Path(__file__).with_name("architectures.json").read_text())
#: Outcomes of an architecture, but for "same".
OUTCOMES = ("refused", "not saved", "not trained", "not built", "not run")
#: Cases of `make test`: one of each family.
CORE = [
    "BertForMaskedLM",
    "CLIPModel",
    "Gemma3ForConditionalGeneration",
    "GPT2LMHeadModel",
    "GraniteMoeForCausalLM",
    "IBertForMaskedLM",
    "JambaForCausalLM",
    "MambaForCausalLM",
    "Qwen3MoeForCausalLM",
    "ResNetForImageClassification",
    "SegformerForSemanticSegmentation",
    "T5ForConditionalGeneration",
    "VideoMAEForVideoClassification",
    "ViTForImageClassification",
    "Wav2Vec2ForCTC",
    "WhisperForConditionalGeneration",
    "XLMWithLMHeadModel",
    "YolosForObjectDetection",
]
#: Cases of `make test` with tables: heads tied and not, with a bias and a soft cap; embeddings that are added to in
#: place, that two modules share, and whose weight the code indexes itself.
CORE_TABLES = [
    "BertForMaskedLM",
    "BlipForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "NanoChatForCausalLM",
    "T5ForConditionalGeneration",
]
#: Cases of `make test` with layers on slices of the batch and parts on tiles of the sequence, and their outcomes.
CORE_CUT = {
    "BertForMultipleChoice": ("cut", "cut"),  # Its layers have a row for each choice.
    "JambaForCausalLM": ("cut", "cut"),
    "OPTForCausalLM": ("cut", "whole"),  # Its layers call the products of their MLPs themselves.
    "Qwen3MoeForCausalLM": ("cut", "cut"),
    "ResNetForImageClassification": ("partly", "none"),  # batch norm, and no tokens
    "ViTMAEModel": ("cut", "cut"),  # Gradients that are smaller than their roundings.
    "WhisperForConditionalGeneration": ("cut", "whole"),
}
#: Tolerance of the loss in pieces beside whole logits, relative to it, and of its gradients, to the largest.
LOSS_APART_MAX, GRADIENT_APART_MAX = 1e-6, 1e-5
#: Longer than any takes, however busy the machine is.
SECONDS = 600


def architectures() -> list[str]:
    """Return the classes that the auto classes with a task list."""
    found = set()
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES"):
            for entry in mapping.values():
                found |= {entry} if isinstance(entry, str) else set(entry)
    return sorted(found)


ARCHITECTURES = architectures()


def is_listed_version() -> bool:
    """Return whether these are the transformers whose architectures are listed."""
    return transformers.__version__.startswith(f"{LISTED['transformers']}.")


def is_trained(name: str) -> bool:
    """Return whether a small model of an architecture was built and trained in memory."""
    return not any(name in LISTED[kind] for kind in ("not built", "not trained", "not run"))


def check(name: str, room: Path) -> None:
    with faults.Child(room, architecture_runs.run, name, room) as child:
        outcome, why = child.receive(SECONDS)
    check_outcome(name, outcome, why)


def check_outcome(name: str, outcome: str, why: str) -> None:
    print(f"{name}: {outcome} {why}")
    assert outcome != "wrong", f"{name}: {why}"
    listed = next(((kind, LISTED[kind][name]) for kind in OUTCOMES if name in LISTED[kind]), ("same", ""))
    if (outcome, why) != listed and not is_listed_version():
        pytest.skip(f"{outcome} ({why}) with transformers {transformers.__version__}, listed is {listed}")
    assert (outcome, why) == listed


def check_tables(name: str, room: Path) -> Seen:
    with faults.Child(room, architecture_runs.run_with_tables, name, room) as child:
        outcome, why = child.receive(SECONDS)
        seen = child.receive(SECONDS)
    if outcome in ("no table", "not built", "not trained"):
        pytest.skip(f"{outcome} {why}")  # some do not know as many tokens as tables need
    check_outcome(name, outcome, why)
    print(seen)
    assert seen.loss_apart <= LOSS_APART_MAX
    assert seen.gradient_apart <= GRADIENT_APART_MAX
    return seen


@pytest.mark.parametrize("name", CORE)
def test_one_of_each_family(name: str, room: Path) -> None:
    assert not any(name in LISTED[kind] for kind in OUTCOMES)
    check(name, room)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(CORE) - LISTED["not run"].keys()))
def test_every_other(name: str, room: Path) -> None:
    check(name, room)


@pytest.mark.parametrize("name", CORE_TABLES)
def test_one_of_each_use_of_tables(name: str, room: Path) -> None:
    seen = check_tables(name, room)
    assert seen.losses, "no loss was computed in pieces, so this proves nothing"
    assert seen.lookups and seen.reads, "no table was read by blocks and rows, so this proves nothing"


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if is_trained(name) and name not in CORE_TABLES])
def test_every_other_with_tables(name: str, room: Path) -> None:
    check_tables(name, room)


def check_cut(name: str, room: Path) -> tuple[str, str]:
    """Return what becomes of an architecture on slices, and on tiles."""
    with faults.Child(room, architecture_slices.run, name, room) as child:
        (on_slices, why), (on_tiles, why_on_tiles) = child.receive(SECONDS), child.receive(SECONDS)
    print(f"{name}: {on_slices} {why}; {on_tiles} {why_on_tiles}")
    assert not {on_slices, on_tiles} & {"wrong", "refused"}, f"{name}: {why} {why_on_tiles}"
    return on_slices, on_tiles


@pytest.mark.parametrize(("name", "expected"), CORE_CUT.items())
def test_layers_on_slices_and_parts_on_tiles(name: str, expected: tuple[str, str], room: Path) -> None:
    assert check_cut(name, room) == expected


@pytest.mark.parametrize(("off", "near"), [(2e-8, True), (1e-6, False), (float("nan"), False)])
def test_a_gradient_of_roundings_is_judged_by_float64(off: float, near: bool) -> None:
    whole, exact = [torch.full((3,), 1e-8)], [torch.zeros(3, dtype=torch.float64)]
    assert architecture_slices._as_near(whole, [torch.full((3,), off)], exact) is near


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if is_trained(name) and name not in CORE_CUT])
def test_every_other_on_slices_and_tiles(name: str, room: Path) -> None:
    if "not trained" in check_cut(name, room):
        pytest.skip("not trained")


def test_the_list_is_of_architectures_that_there_are() -> None:
    names = [name for kind in OUTCOMES for name in LISTED[kind]]
    assert len(names) == len(set(names))
    if is_listed_version():
        assert set(names) < set(ARCHITECTURES)
        assert LISTED["architectures"] == len(ARCHITECTURES)


def test_the_docs_say_how_many() -> None:
    counts = {kind: len(LISTED[kind]) for kind in OUTCOMES}
    trained = LISTED["architectures"] - sum(counts[kind] for kind in ("not trained", "not built", "not run"))
    same = trained - counts["refused"] - counts["not saved"]
    page = " ".join((Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text().split())
    assert f"{LISTED['architectures']:,} architectures of transformers {LISTED['transformers']}" in page
    said = (
        f"{trained} of them could be built small and trained in memory: {same} same bits, {counts['refused']} refused"
    )
    assert f"{said}, {counts['not saved']} that transformers itself cannot save" in page
