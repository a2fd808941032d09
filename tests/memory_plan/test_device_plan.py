"""The device memory plan: budgets kept, a buffer for every unit, the least that works, estimates, and refusals."""

from __future__ import annotations

import random
import re
import weakref
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import memascend
from memascend.errors import BudgetError
from memascend.forecast import simulation
from memascend.hardware.segments import Segments, taken_bytes
from memascend.layout.units import PAGE_BYTES, Unit, partition, round_up
from memascend.memory_plan import device as plan_device
from memascend.memory_plan.device import LEAST_ACTIVATIONS_BYTES, LEAST_TOKENS, MARGIN_SHARE, make_device_plan
from memascend.memory_plan.estimates import Shape
from memascend.slicing.tiles import Tiling
from memascend.vocabulary import chunked_loss

pytestmark = pytest.mark.core

MIB, GIB = 1 << 20, 1 << 30
CONFIGS = Path(__file__).parents[2] / "benches" / "configs"
SHAPE = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


class Census(nn.Module):
    """A model of random sizes: an embedding, layers of one or two shapes, a head, some tied, some frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice([8, 33, 64, 200])
        dtype = draw.choice([torch.bfloat16, torch.float32])
        with torch.device("meta"):
            self.embedding = nn.Embedding(draw.choice([100, 5000, 50_000]), width)
            self.layers = nn.ModuleList(
                nn.Sequential(*(nn.Linear(width, draw.choice([7, 300, 9000])) for _ in range(draw.randint(1, 3))))
                for _ in range(draw.randint(1, 6))
            )
            if draw.random() < 0.7:
                # Of one size, as in most models.
                self.layers.extend(nn.Linear(width, 5000) for _ in range(draw.randint(2, 9)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, self.embedding.num_embeddings, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embedding.weight
        if draw.random() < 0.3:
            for parameter in self.layers.parameters():
                parameter.requires_grad_(False)
        self.to(dtype)


def census(seed: int) -> list[Unit]:
    return partition(Census(seed))


def check(units, plan, budget):
    """Check the assumptions of `DevicePool` and `DeviceCache`."""
    assert plan.total <= budget
    assert plan.total == sum(line.total for line in plan.lines)
    buffers: dict[int, int] = {}
    for line in plan.units:
        assert line.count > 0
        each = line.total // line.count
        assert each * line.count == line.total
        assert each % PAGE_BYTES == 0
        buffers[each] = buffers.get(each, 0) + line.count
    served: dict[int, list[Unit]] = {}
    for unit in units:
        if unit.is_table and unit not in plan.whole_tables:
            continue
        size = min(size for size in buffers if size >= round_up(unit.nbytes, PAGE_BYTES))
        served.setdefault(size, []).append(unit)
    for size, members in served.items():
        # One that is used, beside those that others are used within; never more than there are units.
        held = sum(unit.held for unit in members)
        assert min(len(members), held + 1) <= buffers[size] <= len(members)
    tables = [unit for unit in units if unit.is_table]
    assert plan.blocks.count == (2 if tables else 0)
    assert all(plan.blocks.nbytes >= place.blocks.nbytes for unit in tables for place in unit.places)
    assert all(unit.is_head for unit in plan.whole_tables)
    places = [place for unit in units for place in unit.places if place.parameter.requires_grad]
    trained = [3 * place.blocks.nbytes if place.tensor.unit.is_table else place.nbytes for place in places]
    assert plan.in_flight_bytes >= max(trained, default=0)
    # One on its way, and one that autograd makes.
    assert sum(line.total for line in plan.gradients) >= plan.in_flight_bytes + max(trained, default=0)


@pytest.mark.parametrize("seed", range(60))
def test_any_plan_keeps_its_budget_and_serves_every_unit(seed, request):
    if seed % 3 == 0:
        request.getfixturevalue("small_tables")
    units, draw = census(seed), random.Random(seed)
    known = {"tokens": draw.randint(1, 4096), "config": SHAPE} if seed % 2 else {}
    known["activations"] = draw.choice(["recompute", "host", "ssd", "keep"])
    known["segments"] = draw.choice([None, Segments.of(8), Segments.of()])
    with pytest.raises(BudgetError) as refused:
        make_device_plan(units, 1, **known)
    smallest = refused.value.smallest_bytes
    for budget in (smallest, smallest + draw.randrange(1 << 20), smallest + draw.randrange(1 << 26), smallest * 100):
        plan = make_device_plan(units, budget, **known)
        check(units, plan, budget)
        assert plan.smallest_bytes == smallest <= plan.overlap_bytes or plan.overlap_bytes == smallest
    assert make_device_plan(units, smallest, **known).total == smallest
    with pytest.raises(BudgetError) as again:
        make_device_plan(units, smallest - 1, **known)
    assert again.value.smallest_bytes == smallest
    most = make_device_plan(units, smallest + 100 * sum(unit.nbytes for unit in units), **known)
    assert all(line.note in ("always there", "copied once a step") for line in most.units)
    assert set(most.whole_tables) == {unit for unit in units if unit.is_head}
    overlapping = make_device_plan(units, plan.overlap_bytes, **known)
    assert all(not line.note.startswith("by turns") for line in overlapping.units if line.count > 1)


def test_what_remains_is_for_activations_where_nothing_is_known_of_them():
    model = tiny_models.build("llama")
    units, units_config = partition(model), model.config
    least = make_device_plan(units, GIB, config=units_config).smallest_bytes
    for budget in (least, 2 * least, 64 * least):
        plan = make_device_plan(units, budget, config=units_config)
        remains = plan.rest[-1]
        assert remains.consumer == "activations"
        known = make_device_plan(units, GIB, tokens=LEAST_TOKENS, config=units_config)
        assert remains.total >= sum(line.total for line in known.rest[1:])
        assert budget - PAGE_BYTES < plan.total <= budget
        if budget >= 4 * least:
            assert remains.total >= budget / 2 - PAGE_BYTES
    # A configuration that is none of a language model, or none at all, says nothing either.
    for config in (None, object()):
        assert make_device_plan(units, GIB, tokens=512, config=config).rest[-1].consumer == "activations"


def test_without_a_budget_it_is_what_is_free_less_a_margin():
    units = partition(tiny_models.build("llama"))
    assert make_device_plan(units, None, free=GIB).budget == GIB * (1 - MARGIN_SHARE)
    with pytest.raises(ValueError, match="free"):
        make_device_plan(units, None)


def llama_units():
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return partition(LlamaForCausalLM(SHAPE).to(torch.bfloat16))


def lines(**known):
    plan = make_device_plan(llama_units(), 64 * GIB, **{"config": SHAPE} | known)
    return plan, {line.consumer: line for line in plan.rest}


def test_estimates_by_hand():
    tokens = 2048
    _, found = lines(tokens=tokens)
    assert (found["inputs of layers"].nbytes, found["inputs of layers"].count) == (tokens * 512 * 2, 8)
    # 12 bytes a logit for fp32 logits and gradients, 2 for the caller's; less where gradients will be.
    room = 2 * 4096 * 512 * 2
    assert found["logits"].nbytes == 14 * tokens * 4096 - room
    # Norms, queries and the attention's output, keys and values, the MLP, the layer's output; gradients.
    kept = 2 * (4 + 2 * 2) * 512 + 2 * (2 * 512 + 2 * 256 + 4 * 1408 + 512)
    _, found = lines(tokens=tokens, fused_loss=True)
    assert found["one layer, recomputed"].nbytes == tokens * (kept + 2 * (512 + 2 * 1408))
    assert "logits" not in found
    _, found = lines(tokens=tokens, activations="keep")
    assert (found["activations of layers"].nbytes, found["activations of layers"].count) == (tokens * kept, 8)
    for policy in ("host", "ssd"):
        assert lines(tokens=tokens, activations=policy)[1]["inputs of layers"].count == 3
    assert "gradient of the tied embedding" not in found
    tied = LlamaConfig(**{**SHAPE.to_dict(), "tie_word_embeddings": True})
    assert lines(tokens=tokens, config=tied)[1]["gradient of the tied embedding"].nbytes == 4096 * 512 * 2


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, as long as they live."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.counted:
                    self.counted.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def gone(self, key: int, nbytes: int) -> None:
        self.counted.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b"])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_estimates_are_what_transformers_allocates(name, tokens):
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    config.num_hidden_layers = 1
    shape = Shape.of(config)
    # Fake tensors have sizes and lifetimes, but no memory: held bytes are exact, and nothing is computed.
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda taken: setattr(taken, "grad", None))
        layer = model.model.layers[0]
        hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
        with Held(model) as held:
            output = layer(hidden, position_embeddings=positions)
            assert held.now == pytest.approx(shape.kept_bytes(tokens, 2), rel=0.01)
            output.backward(torch.empty_like(output))
        # At that moment a weight's gradient may be there too, which is a line of its own.
        gradient = 2 * max(parameter.numel() for parameter in layer.parameters())
        layer_bytes = sum(nbytes * count for nbytes, count in shape.layer_tensors(tokens, 2))
        assert 0.99 * layer_bytes <= held.peak <= 1.01 * layer_bytes + gradient
        with Held(model) as held:
            logits = model.lm_head(hidden)
            labels = torch.zeros(1, tokens, dtype=torch.long)
            loss = model.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size)
            loss.backward()
    logits_bytes = sum(nbytes * count for nbytes, count in shape.logits_tensors(tokens))
    expected = logits_bytes + 2 * tokens * config.vocab_size
    assert held.peak == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b"])
@pytest.mark.parametrize(("tokens", "tile"), [(8192, 1024), (32_768, 4096)])
def test_estimates_are_what_tiles_allocate(name, tokens, tile):
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda taken: setattr(taken, "grad", None))
    layer = model.model.layers[0]
    tiling = Tiling(tile, tries=False)
    for part in tiling.parts(layer, [layer]):
        part.forward = tiling.around(part, simulation.as_on_meta(part.forward))
    with simulation.on_meta():
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
        layer(hidden, position_embeddings=positions)  # with the trials
        with Held(model) as held:
            output = layer(hidden, position_embeddings=positions)
            torch.autograd.backward(output, torch.empty_like(output))
    estimate = plan_device.Estimate(partition(model), config, "ssd", True, 0, None, tile)
    estimated = next(line for line in estimate.lines(tokens) if line.consumer == "one layer, recomputed")
    assert held.peak == pytest.approx(estimated.total, rel=0.03)


def test_a_long_sequence_fits_on_tiles():
    """A refusal names the most tokens that fit: one more do not."""
    config = AutoConfig.from_pretrained(CONFIGS / "llama-3.1-8b.json")
    with torch.device("meta"):
        units = partition(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), uploaded=True)

    def planned(tokens, tile_tokens=None):
        known = {"config": config, "activations": "ssd", "segments": Segments.of(), "tile_tokens": tile_tokens}
        return make_device_plan(units, 24 * GIB, tokens=tokens, **known)

    with pytest.raises(BudgetError, match="tile_tokens='auto'") as refused:
        planned(131_072)
    assert planned(131_072, "auto").overlap_bytes < 16 * GIB
    fitting = int(re.search(r"(\d+) fit\)", str(refused.value))[1])
    assert 65_536 < fitting < 131_072 and planned(fitting).total <= 24 * GIB
    with pytest.raises(BudgetError):
        planned(fitting + 1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_pieces_holds_what_is_estimated(small_tables, monkeypatch, smoothing):
    monkeypatch.setattr(chunked_loss, "PIECE_ELEMENTS", 1 << 16)
    monkeypatch.setattr(plan_device, "device_piece_elements", lambda tokens, width: 1 << 16)
    tokens, shape = 700, Shape(hidden=128, queries=128, keys=128, mlp=256, vocabulary=1024)
    torch.manual_seed(0)
    head = nn.Linear(shape.hidden, shape.vocabulary, bias=False).to(torch.bfloat16)
    hidden = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(shape.vocabulary, (tokens,))
    with Held(head) as held:
        loss = memascend.linear_cross_entropy(hidden, head.weight, labels, label_smoothing=smoothing)
    del loss
    estimated = sum(nbytes * count for nbytes, count in plan_device.loss_in_pieces(shape, tokens, 2))
    assert held.peak == pytest.approx(estimated, rel=0.1)


def test_the_table_says_what_is_an_estimate():
    known, unknown = lines(tokens=2048)[0].table(), lines()[0].table()
    for row in known.splitlines():
        if any(row.strip().startswith(what) for what in ("inputs of layers", "logits", "one layer")):
            assert "estimate: " in row
    assert "estimate" not in unknown
    assert "the remainder" in unknown
    for table in (known, unknown):
        assert "of a budget of 64.0 GiB" in table
        assert all(len(line) <= 132 for line in table.splitlines())


def test_layers_on_slices_take_less_for_large_batches():
    def least(**tokens):
        with pytest.raises(BudgetError) as refused:
            make_device_plan(llama_units(), 1, config=SHAPE, activations="ssd", fused_loss=True, **tokens)
        return refused.value.smallest_bytes

    whole, sliced, one = least(tokens=65_536), least(tokens=65_536, layer_tokens=2048), least(tokens=2048)
    assert one < sliced < 0.6 * whole
    assert least(tokens=2048, layer_tokens=2048) == one


def test_frozen_parameters_have_no_gradients():
    units = llama_units()
    for unit in units:
        for place in unit.places:
            place.parameter.requires_grad_(False)
    plan = make_device_plan(units, GIB)
    assert plan.in_flight_bytes == 0
    assert sum(line.total for line in plan.gradients) == 0


@pytest.mark.parametrize(
    ("known", "helps"),
    [
        ({"tokens": 65_536}, ["fewer than 65536 tokens", "activations='host' or 'ssd'", "fused linear cross entropy"]),
        ({"tokens": 65_536, "activations": "ssd", "fused_loss": True}, ["fewer than 65536 tokens"]),
        ({"tokens": 65_536, "activations": "keep"}, ["recompute=True"]),
        ({}, ["a smaller model", "batch_tokens, if a batch has few tokens"]),
    ],
)
def test_too_little_names_the_option_the_least_and_what_helps(known, helps):
    with pytest.raises(BudgetError, match="device_memory") as refused:
        make_device_plan(llama_units(), 8 << 20, **{"config": SHAPE} | known)
    message = str(refused.value)
    assert str(refused.value.smallest_bytes) in message
    assert all(help_ in message for help_ in helps)
    assert ("fused" in message) == (known.get("tokens") is not None and not known.get("fused_loss", False))
    assert ("activations=" in message) == (known.get("tokens") is not None and "activations" not in known)


# ---- segments of PyTorch's allocator ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (0, 0),
        (1, 512),
        (512, 512),
        (MIB, MIB),
        (MIB + 1, 20 * MIB // 19),
        (5 * MIB, 5 * MIB),
        (7 * MIB, 10 * MIB),
        (10 * MIB - 512, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (32 * MIB, 32 * MIB),
    ],
)
def test_tensors_take_pieces_of_segments(nbytes, taken):
    assert taken_bytes(nbytes) == taken


def test_workspaces_are_those_of_the_device_and_of_the_environment(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    assert Segments.of(9) == Segments.of(12) == Segments.of() == Segments(32 * MIB, MIB)
    assert Segments.of(9).workspaces_bytes == 2 * 33 * MIB
    # Two of 8.125 MiB share a segment of 20 MiB.
    assert Segments.of(8).workspaces_bytes == 2 * (10 + 1) * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert Segments.of(9) == Segments(8 * MIB + 128 * 1024, 4 * MIB)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "nonsense")
    assert Segments.of(8) == Segments(8 * MIB + 128 * 1024, MIB)


def test_segments_and_workspaces_are_in_the_least_plan():
    units = llama_units()
    for known in ({}, {"tokens": 2048}):
        without, plan = (make_device_plan(units, GIB, config=SHAPE, segments=s, **known) for s in (None, Segments.of()))
        more = plan.smallest_bytes - without.smallest_bytes
        # At the very least the workspaces, a small and a large segment.
        assert more > Segments.of().workspaces_bytes + 22 * MIB
        assert {"rest of segments", "workspaces"} <= {line.consumer for line in plan.rest}
    # Nothing is known of the layers: PyTorch has some room all the same.
    least = make_device_plan(units, GIB, segments=Segments.of()).smallest_bytes
    (activations,) = (
        line for line in make_device_plan(units, least, segments=Segments.of()).rest if line.consumer == "activations"
    )
    assert activations.total == LEAST_ACTIVATIONS_BYTES


#: Runs on an H200 (`benches/results/device-h200-3.json`): widths, vocabulary, layers; tokens; what is known beside; the
#: budget, and the bytes that PyTorch's allocator reserved.
MEASURED = {
    "32,768 tokens": ((4096, 14336, 2, 32, 8), 32_000, 32_768, {}, 24, 12_941_524_992),
    "131,072 tokens on tiles": ((4096, 14336, 2, 32, 8), 32_000, 131_072, {"tile_tokens": "auto"}, 24, 18_779_996_160),
    "1.5B": ((2048, 5504, 28, 16, 16), 32_000, 16_384, {"activations": "recompute"}, 6, 5_689_573_376),
    "8B": ((4096, 14336, 32, 32, 8), 128_256, 16_384, {}, 24, 21_917_335_552),
    # Adapters over weights in files, where the head is whole.
    "adapters": ((4096, 14336, 32, 32, 8), 128_256, 8_192, {"frozen": True}, 24, 23_943_184_384),
}


@pytest.mark.parametrize("run", MEASURED)
def test_a_plan_is_not_below_what_a_device_reserved(run):
    shape, vocabulary, tokens, known, gib, reserved = MEASURED[run]
    hidden, mlp, layers, heads, keys = shape
    frozen = known.pop("frozen", False)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(not frozen)
    units = partition(model, fused_loss=None if frozen else "auto", uploaded=True)
    known = {"activations": "host", "config": config, "segments": Segments.of(9)} | known
    plan = make_device_plan(units, gib * GIB, tokens=tokens, **known)
    # Not by so much that nothing could be told from it, either.
    assert reserved <= plan.total <= min(plan.budget, 1.3 * reserved)
    # It is room that buffers leave, and not one that a run needs.
    allowed = next(line for line in plan.lines if line.consumer == "freed segments")
    least = make_device_plan(units, plan.smallest_bytes, tokens=tokens, **known)
    assert allowed.total > 0 and least.total <= least.budget == plan.smallest_bytes


def test_estimates_are_of_whole_segments():
    # Logits of 1000 tokens: three of 15.6 MiB in float32, which take 16 each; 7.8 in bfloat16, which take 10.
    tokens, room = 1000, 2 * 4096 * 512 * 2
    plan = make_device_plan(llama_units(), GIB, tokens=tokens, config=SHAPE, segments=Segments.of())
    found = {line.consumer: line for line in plan.rest}
    assert found["logits"].nbytes == (3 * 16 + 10) * MIB - room
    assert found["inputs of layers"].nbytes == tokens * 512 * 2  # less than a MiB: a multiple of 512 bytes
