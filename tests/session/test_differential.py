"""Random programs on two copies of a model, one offloaded: after each piece the same bits, or a refusal.

A failing program is shrunk, and printed as a script to run from tests/support/.
"""

from __future__ import annotations

import collections
import os
import string
from typing import Any

import pytest
import random_programs
from differential import Twins, program_text
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

#: How many programs each of the parts runs. `make soak` sets another number, of all programs.
PARTS = 6
PROGRAMS = int(os.environ.get("MEMASCEND_PROGRAMS", "150")) // PARTS

#: The groups that programs are made of, as often as they are wanted.
SHARES = dict.fromkeys(random_programs.GROUPS, 2) | {
    "train": 4,
    "forwards": 3,
    "resuming": 1,
    "surgery": 1,
    "conversions": 1,
}
if only := os.environ.get("MEMASCEND_PIECES"):
    SHARES = {name: share for name, share in SHARES.items() if name in only.split(",")}
DRAWN_FROM = [name for name, share in SHARES.items() for _ in range(share)]

OPTIONS: dict[str, Any] = {
    "norm": st.sampled_from(["layer", "batch"]),
    "tied": st.booleans(),
    "max_norm": st.sampled_from([None, None, 1.0]),
    "dropout": st.sampled_from([0.0, 0.1]),
    "vocabulary": st.sampled_from([40, 1400]),
    "dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
    "optimizer": st.sampled_from(["AdamW", "SGD", "Lion"]),
    "budget": st.sampled_from(["least", "overlapping", "ample"]),
    "recompute": st.sampled_from([True, True, False]),
    "durability": st.sampled_from(["step", "step", "none"]),
    "watched": st.sampled_from([True, False]),
}


def with_values(piece: str, draw: Any) -> str:
    """Return a piece with a value for each of its names."""
    template = string.Template(piece)
    names = template.get_identifiers()
    return template.substitute({name: draw(st.sampled_from(random_programs.VALUES[name])) for name in names})


@st.composite
def piece(draw: Any) -> str:
    """Return a piece of a program, or nothing, which a needless piece shrinks to."""
    group = draw(st.sampled_from(["nothing", *DRAWN_FROM]))
    return "" if group == "nothing" else with_values(draw(st.sampled_from(random_programs.GROUPS[group])), draw)


@st.composite
def program(draw: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the twins, and pieces."""
    options = {name: draw(values) for name, values in OPTIONS.items()}
    usual = {name: getattr(Twins, name) for name in options}
    parts = draw(st.lists(piece(), min_size=8, max_size=20))
    if draw(st.booleans()):
        parts.insert(0, "loss = model(*batch(0)).loss\nloss.backward()")
    changed = {name: value for name, value in options.items() if value != usual[name]}
    return changed, [part for part in parts if part]


def run(options: dict[str, Any], parts: list[str]) -> collections.Counter[str]:
    """Run a program; print it if the twins part."""
    try:
        with Twins(**options) as twins:
            for part in parts:
                twins(part)
    except Exception as error:
        raise AssertionError(f"{error}\n\n{program_text(options, parts)}\n") from error
    return twins.counts + twins.refusals


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of a program once
@pytest.mark.parametrize("part", range(PARTS))
def test_programs(part: int) -> None:
    counts: collections.Counter[str] = collections.Counter()

    @seed(part)
    @settings(
        max_examples=PROGRAMS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(program())
    def run_one(drawn: tuple[dict[str, Any], list[str]]) -> None:
        counts.update(run(*drawn))
        counts["programs"] += 1

    run_one()
    print(dict(counts))
    assert counts["same"] > 5 * counts["programs"]
    assert counts["same"] > 2 * (counts["refused"] + counts["both raise"])


STEP = "model(*batch(0)).loss.backward()\noptimizer.step()\noptimizer.zero_grad()"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        pytest.param(
            {"recompute": False},
            [
                "h = torch.utils.checkpoint.checkpoint(model.body.layers[0], model.body.embedding(batch(0)[0]), "
                "use_reentrant=True)\nh.square().mean().backward()"
            ],
            id="a graph made in a backward pass saves names of weights",
        ),
        pytest.param({}, [STEP, "model.body.layers[0].average.fill_(7)", "reopen()"], id="buffers of after a step"),
        pytest.param(
            {}, ["with torch.inference_mode():\n    model.head.weight.mul_(2)"], id="writes without a version"
        ),
        pytest.param({}, ['show(f"{model.scale}")'], id="a format string"),
        pytest.param(
            {"vocabulary": 1400, "watched": False},
            [
                "model(*batch(0)).loss.backward()\noptimizer.step()\nmodel.zero_grad(set_to_none=False)",
                "for p in reversed(list(model.parameters())):\n    p.grad = None if p.grad is None else p.grad.add_(1)",
            ],
            id="a gradient written while the step's waits for its update",
        ),
        pytest.param({}, [STEP, "model.zero_grad(set_to_none=False)", "optimizer.step()"], id="zeros after a step"),
    ],
)
def test_programs_that_once_differed(options: dict[str, Any], parts: list[str]) -> None:
    with Twins(**options) as twins:
        assert [twins(part) for part in parts] == ["same"] * len(parts)
        twins.compare_all()
