"""Every mixture of experts of transformers, trained whole and by adapters, has the bits of memory or is refused.

`mixtures.json` has the outcomes that are others than "same", with the reasons. A frozen model is never written to.
"""

from __future__ import annotations

import json
from pathlib import Path

import architecture_mixtures
import faults
import pytest
import requirements
import transformers
from test_architectures import ARCHITECTURES, SECONDS

requirements.package("peft")

LISTED = json.loads(Path(__file__).with_name("mixtures.json").read_text())
WAYS = [str(way) for way in architecture_mixtures.WAYS]
#: Cases of `make test`: fused experts, those with biases and in the other order, and experts that get all tokens.
CORE = ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"]


def is_listed_version() -> bool:
    """Return whether these are the transformers whose mixtures are listed."""
    return transformers.__version__.startswith(f"{LISTED['transformers']}.")


def check(name: str, room: Path) -> None:
    with faults.Child(room, architecture_mixtures.run, name, room) as child:
        outcomes = child.receive(SECONDS)
    print(name, outcomes)
    assert not {way: why for way, (outcome, why) in outcomes.items() if outcome == "wrong"}
    listed = {way: tuple(LISTED["outcomes"].get(name, {}).get(way, ("same", ""))) for way in WAYS}
    if name in LISTED["not trained"]:
        listed = dict.fromkeys(WAYS, ("not trained", LISTED["not trained"][name]))
    if outcomes != listed and not is_listed_version():
        pytest.skip(f"{outcomes} with transformers {transformers.__version__}, listed is {listed}")
    assert outcomes == listed


@pytest.mark.parametrize("name", CORE)
def test_a_mixture_in_every_way(name: str, room: Path) -> None:
    check(name, room)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(LISTED["mixtures"]) - set(CORE)))
def test_every_other_mixture(name: str, room: Path) -> None:
    check(name, room)


def test_the_list_is_of_the_mixtures_that_there_are() -> None:
    if is_listed_version():
        assert architecture_mixtures.mixtures(set(ARCHITECTURES)) == LISTED["mixtures"]
    assert LISTED["outcomes"].keys() <= set(LISTED["mixtures"]) - LISTED["not trained"].keys()
    assert LISTED["not trained"].keys() < set(LISTED["mixtures"])
    assert all(ways.keys() <= set(WAYS) for ways in LISTED["outcomes"].values())


def test_the_docs_say_how_many() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "how-to" / "mixtures.md").read_text().split())
    trained = len(LISTED["mixtures"]) - len(LISTED["not trained"])
    told = f"{len(LISTED['mixtures'])} mixtures of transformers {LISTED['transformers']}"
    assert f"{told}, {trained} of which could be built small and trained in memory" in page
    names = {"full": "full fine-tuning", "attention": "adapters on attention", "experts": "adapters on experts"}
    for way in architecture_mixtures.WAYS:
        outcomes = [ways[str(way)][0] for ways in LISTED["outcomes"].values() if str(way) in ways]
        counts = [trained - len(outcomes), *(outcomes.count(outcome) for outcome in ("refused", "none"))]
        assert f"| {names[way.trained]} | `{way.experts}` | {' | '.join(map(str, counts))} |" in page, (way, counts)
