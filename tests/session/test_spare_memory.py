"""Memory beyond the least is divided between activations and caches: by what steps cost, with the same bits."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
import tiny_models
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend.layout.units import partition
from memascend.memory_plan.host import lend, make_plan, replan, smallest_plan
from memascend.memory_plan.lines import Plan
from memascend.session.spare_memory import COUNTED, SETTLING, ShareSearch, StepCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Offload = Callable[..., nn.Module]

MIB = 2**20
ROWS, TOKENS = 4, 32


# ---- the decision ---------------------------------------------------------------------------------------------------


def found(cost: Callable[[int, float], StepCost]) -> tuple[float, int]:
    """Return the share that is found where step `number` with a share costs `cost(number, share)`, and the steps."""
    spare = ShareSearch()
    for number in range(100):
        if spare.found:
            return spare.share, number
        spare.after(cost(number, spare.share))
    raise AssertionError("no share was found")


def step(share: float, waits: Sequence[float], recomputed: float = 10.0, times: float = 1.0) -> StepCost:
    """Return a step that waits for so many seconds with the shares 0, 1/4, 1/2 and 1 (0.75 is not tried)."""
    waited = dict(zip((0.0, 0.25, 0.5, 1.0), waits, strict=True))[share]
    recomputed *= (1 - share) * times
    return StepCost(30.0 * times + waited + recomputed, waited, recomputed, int(1000 * times))


@pytest.mark.parametrize(
    ("waits", "share"),
    [
        ((0.5, 0.5, 0.5, 0.5), 1.0),  # the processor binds
        ((1.0, 1.0, 1.0, 2.5), 1.0),  # the drives have room for nearly all
        ((1.0, 1.0, 1.0, 9.0), 0.5),  # for half of it
        ((1.0, 1.0, 9.0, 20.0), 0.25),
        ((1.0, 9.0, 15.0, 30.0), 0.0),  # for nothing
        ((12.0, 12.0, 12.0, 12.0), 0.0),  # the drives bind
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(1.0,), (1.0, 0.4, 2.0, 0.7)], ids=["alike", "of all lengths"])
def test_the_share_with_which_steps_cost_least(waits: Sequence[float], share: float, lengths: Sequence[float]) -> None:
    actual, steps = found(lambda number, now: step(now, waits, times=lengths[number % len(lengths)]))
    assert actual == share
    assert steps <= 4 * (SETTLING + COUNTED)


def test_where_the_drives_bind_nothing_is_tried() -> None:
    tried: set[float] = set()

    def cost(_: int, share: float) -> StepCost:
        tried.add(share)
        return step(share, (12.0, 20.0, 30.0, 40.0))

    assert found(cost) == (0.0, SETTLING + COUNTED)
    assert tried == {0.0}


@pytest.mark.parametrize("disturbed", range(COUNTED + SETTLING))
def test_a_step_that_was_disturbed_decides_nothing(disturbed: int) -> None:
    def cost(number: int, share: float) -> StepCost:
        usual = step(share, (1.0, 1.0, 1.0, 1.0))
        if number % (COUNTED + SETTLING) != disturbed:
            return usual
        return StepCost(usual.seconds + 80, usual.waits + 60, usual.recomputed * 3, usual.elements)

    assert found(cost)[0] == 1.0


def test_nothing_that_is_computed_again_is_nothing_to_spare() -> None:
    assert found(lambda _, share: step(share, (0.0, 0.0, 0.0, 0.0), recomputed=0.1)) == (0.0, SETTLING + COUNTED)


# ---- the plan -------------------------------------------------------------------------------------------------------


def plan_of(model: nn.Module, share: float = 0.6, **options: Any) -> Plan:
    """Return the plan of the smallest budget, in MiB, that holds this share of the states."""
    units = partition(model)
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())
    budget = smallest_plan(units).total
    while (plan := make_plan(units, budget, lends=True, **options)).states.total < share * needed:
        budget += MIB
    return plan


@pytest.mark.parametrize("nbytes", [0, 1, MIB, 3 * MIB, 1 << 50])
def test_bytes_are_lent_and_taken_back(nbytes: int) -> None:
    model = tiny_models.build("gpt2", torch.float32)
    plan, units = plan_of(model), partition(model)
    least = lend(plan, units, 1 << 50).total  # with chunks of this size
    assert least > plan.smallest_bytes == smallest_plan(units).total
    lent = lend(plan, units, nbytes)
    assert lent.lent_bytes == min(nbytes, plan.budget - least)
    assert lent.left_bytes >= lent.lent_bytes and lent.total >= least
    assert lent.total + lent.freed_blocks_bytes + lent.activations_bytes <= plan.budget
    again = lend(lent, units, 0)
    assert (again.lines, again.lent_bytes) == (plan.lines, 0)


def _sizes(width: int, vocabulary: int, layers: int = 8, **changed: Any) -> LlamaConfig:
    sizes = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
    }
    return LlamaConfig(**sizes | {"vocab_size": vocabulary} | changed)


@pytest.mark.parametrize(
    "config",
    [_sizes(1024, 32_000, 24), _sizes(1024, 150_000), _sizes(512, 64_000, tie_word_embeddings=True), _sizes(2048, 512)],
    ids=["deep", "two large tables", "one table", "no table"],
)
def test_a_smaller_budget_has_no_more_of_any_buffer(config: LlamaConfig) -> None:
    """Where a large buffer has no room, small ones do: as many as addresses are reserved for."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    units, random = partition(model), Random(3)
    least = smallest_plan(units).total
    whole = make_plan(units, 1 << 62).total
    for _ in range(20):
        budget = random.randrange(least, whole)
        plan = make_plan(units, budget, lends=True)
        larger = make_plan(units, budget, random.randrange(budget, whole + 1))
        for made in [replan(larger, units, random.randrange(larger.smallest_bytes, larger.most.budget))] + [
            lend(plan, units, random.randrange(budget)) for _ in range(10) if plan.lends
        ]:
            assert made.total + made.freed_blocks_bytes + made.lent_bytes <= made.budget
            counts = [{}, {}]
            for of, kinds in zip((made, made.most), counts, strict=True):
                for line in (*of.buffers, of.staging_cache, of.states):
                    kinds[line.consumer, line.nbytes] = line.count
            assert all(count <= counts[1].get(kind, 0) for kind, count in counts[0].items() if count), counts
            assert set(made.whole_tables) <= set(made.most.whole_tables)


def test_what_saves_least_is_lent_first() -> None:
    """States go before gradients."""
    model = tiny_models.build("gpt2", torch.float32)
    plan, units = plan_of(model), partition(model)
    alone, without_states, nearly_all = (lend(plan, units, n) for n in (0, plan.states.total, plan.budget))
    assert alone.states.count > 2 and without_states.states.count == nearly_all.states.count == 0
    assert alone.staging_cache.count == without_states.staging_cache.count > nearly_all.staging_cache.count


def test_freed_blocks_keep_their_room() -> None:
    model = tiny_models.build("gpt2", torch.float32)
    units = partition(model)
    plan = make_plan(units, smallest_plan(units).total + (1 << 30), lends=True)
    plan.states.count = 0
    lent = lend(plan, units, 1 << 50)
    assert plan.retain_heap and lent.retain_heap
    assert lent.left_bytes == lent.lent_bytes > 0


def test_the_least_budget_lends_nothing() -> None:
    units = partition(tiny_models.build("gpt2", torch.float32))
    plan = make_plan(units, smallest_plan(units).total, lends=True)
    assert not plan.lends and plan.most is None


# ---- runs -----------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, architecture: str, steps: int, clip: bool = True, first: int = 0) -> Any:
    optimizer = memascend.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    losses = []
    for number in range(first, first + steps):
        torch.manual_seed(number)
        loss = model(**tiny_models.batch(architecture, number, ROWS, TOKENS)).loss
        loss.backward()
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        del loss
    return losses, dict(memascend.parameters_of(model))


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Have a run take these shares one after the other, and stay with the last."""

    def take(given: Sequence[float]) -> None:
        left: Iterator[float] = iter(given)

        def after(self: ShareSearch, _: StepCost) -> None:
            self.share = next(left, self.share)

        monkeypatch.setattr(ShareSearch, "after", after)

    return take


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gpt2", {"micro_batch_size": 2, "update": "backward"}),
        ("t5_dropout", {"micro_batch_size": 2}),
        ("qwen3_moe", {"tile_tokens": 16}),
    ],
    ids=str,
)
def test_any_division_has_the_same_bits(
    offloaded: Offload, shares: Any, architecture: str, options: dict[str, Any]
) -> None:
    def build() -> nn.Module:
        return tiny_models.build(architecture, torch.float32)

    given = options | {"host_memory": plan_of(build()).budget, "durability": "step"}
    steps, clip = 6, "update" not in options
    model = offloaded(build(), spare_memory="states", **given)
    expected = trained(model, architecture, steps, clip)
    recomputed = memascend.stats(model)["layers_recomputed"]
    assert memascend.stats(model)["activation_bytes_lent"] == 0
    memascend.close(model)

    model = offloaded(build(), spare_memory="activations", **given)
    assert bit_equality.difference(trained(model, architecture, steps, clip), expected) is None
    stats = memascend.stats(model)
    assert stats["activation_bytes_lent"] > 0
    assert stats["layers_recomputed"] < recomputed
    memascend.close(model)

    shares([1.0, 1.0, 0.0, 0.5])
    model = offloaded(build(), **given)
    assert bit_equality.difference(trained(model, architecture, steps, clip), expected) is None
    lent = memascend.stats(model)["activation_bytes_lent"]
    assert 0 < lent <= stats["activation_bytes_lent"]


def test_memory_stays_within_the_budget(offloaded: Offload, shares: Any) -> None:
    """Lent memory leaves the arena before activations come, and comes back after they are gone."""
    model = tiny_models.build("gpt2", torch.float32)
    limit = plan_of(model).budget
    model = offloaded(model, host_memory=limit, durability="step", micro_batch_size=1)
    shares([0.0, 1.0, 1.0, 0.3, 0.0, 0.0])
    session = memascend.offload_of(model)
    whole = memascend.stats(model)["host_bytes_reserved"]
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    seen = []
    for number in range(7):
        loss = model(**tiny_models.batch("gpt2", number, ROWS, TOKENS)).loss
        stats = memascend.stats(model)
        assert stats["host_bytes_reserved"] == session.plan.arena_bytes
        assert (stats["host_bytes_reserved"] < whole) == (stats["activation_bytes_lent"] > 0)
        assert session.plan.total + stats["activation_bytes_kept"] <= limit
        seen.append(stats["activation_bytes_lent"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] == seen[1] == seen[5] == 0
    assert 0 < seen[4] < seen[2] == seen[3]


@pytest.mark.parametrize("spare", ["states", "activations"])
def test_a_resumed_run_divides_as_it_likes(offloaded: Offload, store: Path, spare: str) -> None:
    limit = plan_of(tiny_models.build("gpt2", torch.float32)).budget
    given = {"host_memory": limit, "durability": "step"}
    model = offloaded(tiny_models.build("gpt2", torch.float32), spare_memory="states", **given)
    expected = trained(model, "gpt2", 6)[0][3:]
    memascend.close(model)
    model = offloaded(tiny_models.build("gpt2", torch.float32), spare_memory="activations", keep_store=True, **given)
    trained(model, "gpt2", 3)
    memascend.close(model)
    resumed = memascend.resume(
        store,
        model=tiny_models.build("gpt2", torch.float32),
        host_memory=limit,
        spare_memory=spare,
        allocator="pageable",
    )
    try:
        (optimizer,) = resumed.optimizers
        losses = []
        for number in range(3, 6):
            torch.manual_seed(number)
            loss = resumed.model(**tiny_models.batch("gpt2", number, ROWS, TOKENS)).loss
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        assert bit_equality.difference(losses, expected) is None
        assert (memascend.stats(resumed.model)["activation_bytes_lent"] > 0) == (spare == "activations")
    finally:
        memascend.close(resumed.model)


class Narrow(nn.Module):
    """Saves a fourth of a tensor for the backward pass, and so keeps all of it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 256)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        part = self.wide(hidden)[..., :64]
        return hidden + part * torch.sigmoid(part)


def test_a_call_that_keeps_more_than_it_has_saved(offloaded: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up where only its saved tensors have room, and then all that it keeps alive counts as wanted."""
    monkeypatch.setattr(Plan, "activations_bytes", MIB)
    model = offloaded(nn.Sequential(*(Narrow() for _ in range(4))))
    kept = memascend.offload_of(model).host_budget.kept
    wanted = []
    for _ in range(3):
        model(torch.randn(1024, 64)).square().mean().backward()
        wanted.append(kept.wanted_bytes)
    saved, wide = 1024 * 64 * 4, 1024 * 256 * 4
    assert wanted[0] < 4 * 3.1 * saved
    assert wanted[1] - wanted[0] == wanted[2] - wanted[0] == wide - saved
    assert memascend.stats(model)["layers_kept"] == 0


@pytest.mark.parametrize("durability", ["none", "every:2"])
def test_where_more_would_be_written_nothing_is_tried(offloaded: Offload, shares: Any, durability: str) -> None:
    shares([1.0])
    model = tiny_models.build("gpt2", torch.float32)
    model = offloaded(model, host_memory=plan_of(model).budget, durability=durability)
    trained(model, "gpt2", 4)
    assert memascend.stats(model)["activation_bytes_lent"] == 0
    assert not memascend.offload_of(model).host_budget.kept.measures


def test_the_costs_of_a_step_are_of_its_own_batch(offloaded: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("gpt2", torch.float32)
    model = offloaded(model, host_memory=plan_of(model).budget, durability="step")
    counted: list[int] = []
    monkeypatch.setattr(ShareSearch, "after", lambda self, cost: counted.append(cost.elements))
    optimizer = memascend.AdamW(model.parameters(), lr=3e-3)
    lengths = (8, 32, 16, 8)
    for number, length in enumerate(lengths):
        model(**tiny_models.batch("gpt2", number, ROWS, length)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, second, third = counted
    assert second > 1.5 * third > 1.5 * first


def test_a_budget_that_changes_goes_on_lending(offloaded: Offload) -> None:
    build = tiny_models.build("gpt2", torch.float32)
    limit = plan_of(build).budget
    model = offloaded(build, host_memory=limit, host_memory_max=limit + 2 * MIB, spare_memory="activations")
    trained(model, "gpt2", 2)
    lent = memascend.stats(model)["activation_bytes_lent"]
    assert lent > 0
    memascend.set_host_memory(model, limit + 2 * MIB)
    trained(model, "gpt2", 2, first=2)
    stats = memascend.stats(model)
    assert stats["activation_bytes_lent"] > 0
    assert stats["layers_kept"] > 0
    assert stats["host_bytes_planned"] + stats["activation_bytes_kept_peak"] <= limit + 2 * MIB


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"recompute": False}, "recompute=False"),
        ({"host_memory": "auto"}, "host_memory='auto'"),
        ({"allocator": "cuda"}, "allocator='cuda'"),
    ],
    ids=str,
)
def test_where_nothing_can_be_lent_to_activations(offloaded: Offload, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"spare_memory='activations' does not work with {named}: .*leave it out"):
        offloaded(tiny_models.build("gpt2", torch.float32), spare_memory="activations", **options)
    if options.get("allocator") != "cuda":  # There is none here.
        offloaded(tiny_models.build("gpt2", torch.float32), **options)


def test_a_value_that_the_option_does_not_have(offloaded: Offload) -> None:
    with pytest.raises(ValueError, match="spare_memory='weights' is not one of 'auto', 'states', 'activations'"):
        offloaded(tiny_models.build("gpt2", torch.float32), spare_memory="weights")
