"""Every architecture that transformers' auto classes list: small, offloaded, it computes the bits of the run in memory.

`architectures.json` lists those that do not get that far, with the reasons. It is true: an entry that begins to work
makes its test fail, and so does another that stops.
"""

from __future__ import annotations

import json
from pathlib import Path

import architecture_runs
import lab
import pytest
import transformers
from transformers.models.auto import modeling_auto

LISTED = json.loads(Path(__file__).with_name("architectures.json").read_text())
#: What may become of an architecture, but for "same".
OUTCOMES = ("refused", "not saved", "not trained", "not built")
#: What `make test` runs: one of each family.
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
#: Longer than any takes, however busy the machine is.
SECONDS = 600


def architectures() -> list[str]:
    """The classes that the auto classes with a task list."""
    found = set()
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES"):
            for entry in mapping.values():
                found |= {entry} if isinstance(entry, str) else set(entry)
    return sorted(found)


ARCHITECTURES = architectures()


def is_listed_version() -> bool:
    """Whether these are the transformers whose architectures are listed."""
    return transformers.__version__.startswith(f"{LISTED['transformers']}.")


def check(name: str, room: Path) -> None:
    with lab.Child(room, architecture_runs.run, name, room) as child:
        outcome, why = child.receive(SECONDS)
    print(f"{name}: {outcome} {why}")
    assert outcome != "wrong", f"{name}: {why}"
    listed = next(((kind, LISTED[kind][name]) for kind in OUTCOMES if name in LISTED[kind]), ("same", ""))
    if (outcome, why) != listed and not is_listed_version():
        pytest.skip(f"{outcome} ({why}) with transformers {transformers.__version__}, listed is {listed}")
    assert (outcome, why) == listed


@pytest.mark.parametrize("name", CORE)
def test_one_of_each_family(name: str, room: Path) -> None:
    assert not any(name in LISTED[kind] for kind in OUTCOMES)
    check(name, room)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - set(CORE)))
def test_every_other(name: str, room: Path) -> None:
    check(name, room)


def test_the_list_is_of_architectures_that_there_are() -> None:
    names = [name for kind in OUTCOMES for name in LISTED[kind]]
    assert len(names) == len(set(names))
    if is_listed_version():
        assert set(names) < set(ARCHITECTURES)
        assert LISTED["architectures"] == len(ARCHITECTURES)
