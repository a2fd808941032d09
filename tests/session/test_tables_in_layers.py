"""Tables within layers, of n-grams for one, are read by rows: bits, memory, durable steps and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import nn

import memascend
from memascend.errors import MemascendError
from memascend.forecast import traffic
from memascend.forecast.workload import Workload
from memascend.layout import tables as layout
from memascend.layout import units as layout_units
from memascend.layout.units import partition
from memascend.memory_plan.host import smallest_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_tables")
ROWS, WIDTH, TOKENS = 4096, 32, 64
LAYERS = 3


class Layer(nn.Module):
    """A layer that adds rows of a table of pairs of tokens to what it computes."""

    def __init__(self, dropout: float, rows: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pairs = nn.Embedding(rows, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pairs = (ids + 31 * torch.roll(ids, 1, dims=-1)) % ROWS
        return hidden + self.dropout(self.down(F.gelu(self.up(self.norm(hidden + self.pairs(pairs))))))


class Decoder(nn.Module):
    """Layers with tables, and tables of longer n-grams in a list of their own."""

    def __init__(self, dropout: float = 0.0, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.grams = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Layer(dropout, rows) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for number, table in enumerate(self.grams, 2):
            hidden = hidden + table((ids * number + torch.roll(ids, number, dims=-1)) % ROWS)
        for layer in self.layers:
            hidden = layer(hidden, ids)
        return F.cross_entropy(self.head(hidden).view(-1, ROWS), labels.view(-1))


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randint(ROWS, (4, TOKENS // 4), generator=generator) for name in ("ids", "labels")}


def train(model: nn.Module, steps: int = 3, first: int = 0, accumulate: int = 1, clip: bool = True) -> Any:
    """Train on batches from `first` on; return losses, and weights in memory."""
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(3)
    losses = []
    for step in range(first, first + steps):
        for micro in range(accumulate):
            loss = model(**batch(accumulate * step + micro))
            loss.backward()
            losses.append(loss.detach().clone())
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().cpu().clone() for name, value in memascend.parameters_of(model)}


def assert_same(got: Any, expected: Any) -> None:
    assert all(map(torch.equal, got[0], expected[0]))
    tiny_models.assert_same_weights(got[1], expected[1])


def streamed(model: nn.Module) -> list[str]:
    session = model._memascend
    return [unit.name for unit in session.units if session.streamer.is_streamed(unit)]


#: Units of the tables in layers.
TABLES = {f"layers.{number}.pairs" for number in range(LAYERS)}


def least(model: nn.Module, *, fused_loss: bool | str = "auto", update: str = "forward", **_: Any) -> int:
    return smallest_plan(partition(model, fused_loss=fused_loss), update=update).total


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": False}, {"update": "backward"}, {"fused_loss": False}, {"host_memory": "64MiB"}],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "the least memory",
)
def test_training_has_the_bits_of_memory(offloaded: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    clip = options.get("update") != "backward"
    expected = train(Decoder(dropout=0.2), clip=clip)
    model = Decoder(dropout=0.2)
    model = offloaded(model, **{"host_memory": least(model, **options)} | options)
    assert (set(streamed(model)) >= TABLES) == ("host_memory" not in options)
    assert_same(train(model, clip=clip), expected)


def test_passes_and_slices_add_up(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    expected = train(Decoder(), accumulate=3)
    model = Decoder()
    assert_same(train(offloaded(model, host_memory=least(model)), accumulate=3), expected)
    in_memory = Decoder()
    memascend.run_in_slices(in_memory, 1)
    expected = train(in_memory)
    model = Decoder()
    sliced = offloaded(model, host_memory=least(model), micro_batch_size=1, store=tmp_path / "sliced")
    assert set(streamed(sliced)) >= TABLES
    assert_same(train(sliced), expected)


@pytest.mark.parametrize("frozen", ["pairs", "all but pairs"])
def test_frozen_ones(offloaded: Callable[..., nn.Module], frozen: str) -> None:
    def build() -> nn.Module:
        model = Decoder()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(("pairs" in name) != (frozen == "pairs"))
        return model

    expected = train(build())
    model = build()
    assert_same(train(offloaded(model, host_memory=least(model))), expected)


def test_only_their_rows_are_read(offloaded: Callable[..., nn.Module]) -> None:
    model = Decoder().requires_grad_(False)
    whole = sum(unit.nbytes for unit in partition(model, fused_loss=None))
    model = offloaded(model, host_memory=least(model))
    few = {name: value[:1, :4] for name, value in batch(0).items()}
    with torch.no_grad():
        model(**few)  # The first rows of each MiB have the MiB compared.
        before = memascend.stats(model)["ssd_bytes_read"]
        model(**few)
    in_tables = (LAYERS + 3) * ROWS * WIDTH * 4
    assert 0 < memascend.stats(model)["ssd_bytes_read"] - before < whole - 0.8 * in_tables


def test_the_least_memory_has_no_room_for_them() -> None:
    model = Decoder(rows=16 * ROWS)
    apart, together = (smallest_plan(partition(model, fused_loss=how)).total for how in ("auto", None))
    assert together - apart > 12 * ROWS * WIDTH * 4


def test_a_recomputed_layer_looks_up_twice_by_the_forecast() -> None:
    model = Decoder()
    places = [place for unit in partition(model) if unit.is_table for place in unit.places]
    for recompute, times in ((True, 2), (False, 1)):
        work = Workload(TOKENS, 1, 1, recompute=recompute)
        found = {place.tensor.unit.name: traffic._lookups(model, place, work) for place in places}
        assert found == dict.fromkeys(TABLES, times) | dict.fromkeys(["embed", "grams.0", "grams.1"], 1)


def test_those_that_more_than_embeddings_hold_stay_with_their_layers() -> None:
    model = Decoder()
    model.layers[0].head = nn.Linear(WIDTH, ROWS, bias=False)
    model.layers[0].head.weight = model.layers[0].pairs.weight
    model.layers[1].pairs.max_norm = 1.0
    names = {unit.name for unit in partition(model)}
    assert names & TABLES == {"layers.2.pairs"}
    model = Decoder()
    assert not {unit.name for unit in partition(model, fused_loss=None)} & TABLES


def test_a_table_that_was_written_between_the_passes_is_refused(offloaded: Callable[..., nn.Module]) -> None:
    model = Decoder()
    model = offloaded(model, host_memory=least(model))
    loss = model(**batch(0))
    with torch.no_grad():
        model.layers[1].pairs.weight.mul_(2)
    with pytest.raises(MemascendError, match=r"layers\.1\.pairs\.weight"):
        loss.backward()


@pytest.mark.parametrize("before", ["apart", "in their layers"])
def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Also one whose store was made when they moved with their layers."""
    expected = Decoder()
    optimizer = memascend.AdamW(expected.parameters(), lr=1e-2)
    _steps(expected, optimizer, range(4))
    model = Decoder()
    with monkeypatch.context() as patch:
        if before == "in their layers":
            for module in (layout, layout_units):
                patch.setattr(module, "find_tables_in_layers", lambda model: set())
        memascend.offload(model, store=tmp_path, host_memory="64MiB", durability="step", keep_store=True)
        assert bool({unit.name for unit in model._memascend.units} & TABLES) == (before == "apart")
        _steps(model, memascend.AdamW(model.parameters(), lr=1e-2), range(2))
        memascend.close(model)
    model = Decoder()
    run = memascend.resume(tmp_path, model=model, host_memory=least(model))
    assert set(streamed(run.model)) >= TABLES
    _steps(run.model, run.optimizer, range(2, 4))
    tiny_models.assert_same_weights(dict(memascend.parameters_of(run.model)), dict(expected.named_parameters()))
    memascend.close(run.model)


def _steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        model(**batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.own_products
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_read_them_between_graphs(offloaded: Callable[..., nn.Module]) -> None:
    def compiled(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(backend="eager")
        return model

    expected = train(compiled(Decoder()))
    model = Decoder()
    model = compiled(offloaded(model, host_memory=least(model)))
    assert set(streamed(model)) >= TABLES
    assert_same(train(model), expected)


@pytest.mark.gpu
def test_a_device_has_the_bits_of_memory(offloaded: Callable[..., nn.Module]) -> None:
    expected = train(Decoder().cuda())
    model = offloaded(Decoder(), device="cuda", device_memory="1GiB", host_memory="64MiB", allocator="auto")
    assert_same(train(model), expected)
