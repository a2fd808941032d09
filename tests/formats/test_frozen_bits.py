"""Frozen weights that are quantised as a model is opened: bits of bitsandbytes, and runs of the model in memory."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import quantised_models as models
import requirements
import torch
from torch import nn

import memascend
from memascend.errors import CheckpointError, MemascendError, StoreError
from memascend.layout import quantising
from memascend.layout.bits import quantised_nbytes
from memascend.session import quantised_files
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., nn.Module]]:
    """Open a model with its weights quantised."""
    opened_models: list[nn.Module] = []

    def from_pretrained(model: nn.Module, bits: int, **options: Any) -> nn.Module:
        directory = tmp_path / "model"
        model.save_pretrained(directory)
        defaults: dict[str, Any] = {"host_memory": "64MiB", "allocator": "pageable", "frozen": "store"}
        options = defaults | {"store": tmp_path / f"store{len(opened_models)}"} | options
        opened_models.append(memascend.from_pretrained(directory, frozen_bits=bits, **options))
        return opened_models[-1]

    yield from_pretrained
    for model in opened_models:
        memascend.close(model)


def by_bitsandbytes(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise and dequantise a weight with the library."""
    functional = requirements.package("bitsandbytes").functional
    if bits == 8:
        return functional.dequantize_blockwise(*functional.quantize_blockwise(value))
    return functional.dequantize_4bit(*functional.quantize_4bit(value, compress_statistics=True, quant_type="nf4"))


def are_quantised(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a small model that are to be quantised."""
    ends = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")
    return {name: value for name, value in model.named_parameters() if name.endswith(ends)}


def quantised_in_memory(model: nn.Module, bits: int) -> nn.Module:
    for value in are_quantised(model).values():
        value.data.copy_(by_bitsandbytes(value.data, bits))
    return model


# ---- bits ---------------------------------------------------------------------------------------------------------


def values_of(kind: str, count: int) -> torch.Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    if kind == "zeros":
        values[64:192] = 0.0
        values[4096:8192] = 0.0
    elif kind == "small":
        values *= 1e-36
    elif kind == "wide":
        values *= torch.logspace(-12, 12, count)
    return values.bfloat16()


@pytest.mark.parametrize("kind", ["usual", "zeros", "small", "wide"])
def test_numbers_and_scales_are_those_of_bitsandbytes(kind: str) -> None:
    functional = requirements.package("bitsandbytes").functional
    assert torch.equal(quantising.dynamic_code(), functional.create_dynamic_map())
    for count in (1 << 20, 64 * 300 + 22, 30):
        values = values_of(kind, count)
        packed, scales = quantising.to_four_bits(values)
        wanted, state = functional.quantize_4bit(values, compress_statistics=True, quant_type="nf4")
        assert torch.equal(packed, wanted.view(-1)) and torch.equal(torch.tensor(quantising.NF4), state.code)
        nested = quantising.quantise_scales(scales)
        assert torch.equal(nested.scales, state.absmax) and torch.equal(nested.factors, state.state2.absmax)
        assert nested.offset == float(state.offset)
        numbers, scales = quantising.to_bytes(values)
        wanted, state = functional.quantize_blockwise(values)
        assert torch.equal(numbers, wanted.view(-1)) and torch.equal(scales, state.absmax)


def test_every_quotient_is_looked_up_as_by_bitsandbytes() -> None:
    """Quotients on both sides of every bound between the parts of -1 .. 1."""
    functional = requirements.package("bitsandbytes").functional
    bounds = (torch.arange(65535, dtype=torch.float64) + 0.5) / 65535 * 2 - 1
    near = bounds.float()
    around = [near, near.nextafter(torch.tensor(2.0)), near.nextafter(torch.tensor(-2.0))]
    values = torch.cat([*around, torch.tensor([1.0])])
    block = 1 << 18  # One block, whose scale is 1.
    wanted = torch.empty(len(values), dtype=torch.uint8)
    for first in range(0, len(values), 4095):
        part = torch.cat([values[first : first + 4095], torch.tensor([1.0])])
        wanted[first : first + len(part) - 1] = functional.quantize_blockwise(part)[0][:-1]
    assert torch.equal(quantising.to_bytes(values, block)[0], wanted)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_without_a_scale_are_refused_by_name(value: float, opened: Callable[..., nn.Module]) -> None:
    model = models.llama()
    name = "model.layers.1.mlp.up_proj.weight"
    model.get_parameter(name).data[3, 5] = value
    for bits in (4, 8):
        with pytest.raises(CheckpointError, match=rf"{name} has values that are infinite or NaN.*in {bits} bits"):
            opened(model, bits)


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("make", [models.llama, models.moe], ids=["llama", "experts"])
def test_linear_weights_of_layers_are_those_of_bitsandbytes(
    make: Callable[[], nn.Module], bits: int, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    theirs = make()
    ours = opened(theirs, bits)
    changed = are_quantised(theirs)
    before = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    quantised_in_memory(theirs, bits)
    assert changed and all(not torch.equal(before[name], value) for name, value in changed.items())
    wanted = dict(theirs.named_parameters())
    found = {name: value.detach().clone() for name, value in memascend.parameters_of(ours)}
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    # A pass reads the bytes of the quantised layers, no more, and the store has the rest.
    session = offload_of(ours)
    layers = [value for name, value in wanted.items() if ".layers." in name]
    in_16_bits = sum(value.nbytes for value in layers)
    taken = in_16_bits + sum(quantised_nbytes(value.numel(), bits) - value.nbytes for value in changed.values())
    assert memascend.stats(ours)["file_bytes_read"] == taken == sum(u.stored_nbytes for u in session.units if u.bits)
    assert 1.8 < in_16_bits / taken < 2 if bits == 8 else 3.2 < in_16_bits / taken < 4
    # Their file has no name, and its room is free once the model is closed.
    assert len(_unnamed(tmp_path)) == 1
    memascend.close(ours)
    assert not _unnamed(tmp_path)
    assert not (tmp_path / "store0").exists() or os.listdir(tmp_path / "store0") == []


def _unnamed(room: Path) -> list[str]:
    """Return the files in `room` that this process has open and that have no name, as paths that open them."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        with suppress(OSError):
            target = os.readlink(path)
            if target.startswith(str(room)) and target.endswith(" (deleted)"):
                found.append(path)
    return found


@pytest.mark.parametrize("direct", [True, False])
def test_bytes_that_the_drive_has_changed_are_found(
    direct: bool, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    ours = opened(models.llama(), 4, direct=direct)
    (path,) = _unnamed(tmp_path)
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 16]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreError, match=rf"{tmp_path}/store0.*4096 bytes at offset.*not those of the quantised"):
        dict(memascend.parameters_of(ours))


def test_weights_of_many_pieces_take_turns_among_drives(
    tmp_path: Path, opened: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_files, "PIECE_ELEMENTS", 8192)
    theirs = models.llama(intermediate_size=704)
    ours = opened(theirs, 4, store=[tmp_path / "a", tmp_path / "b"])
    quantised_in_memory(theirs, 4)
    found = dict(memascend.parameters_of(ours))
    assert all(torch.equal(found[name], value) for name, value in theirs.named_parameters())
    assert {file.bytes_read > 0 for file in offload_of(ours).files} == {True} and len(offload_of(ours).files) == 2


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fdatasync"])
def test_a_drive_without_room_is_named(
    call: str, tmp_path: Path, opened: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, *_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(quantised_files.os, call, no_room)
    with pytest.raises(OSError, match=r"No space left on device.*store0"):
        opened(models.llama(), 4)
    assert not _unnamed(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_in_memory_is_quantised_as_one_that_is_read(
    bits: int, opened: Callable[..., nn.Module], offloaded: Callable[..., nn.Module]
) -> None:
    read = opened(models.moe(), bits)
    ours = offloaded(models.moe().requires_grad_(False), frozen_bits=bits)
    found, wanted = dict(memascend.parameters_of(ours)), dict(memascend.parameters_of(read))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(unit.bits == bits for unit in offload_of(ours).units)


# ---- training -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers for it
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_are_those_over_the_quantised_model_in_memory(
    bits: int, tmp_path: Path, opened: Callable[..., nn.Module]
) -> None:
    peft = requirements.package("peft")
    theirs = models.llama()
    ours = opened(theirs, bits, fused_loss=False)
    losses, adapters = [], []
    for base in (quantised_in_memory(theirs, bits), ours):
        torch.manual_seed(3)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for step in range(3):
            ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        adapters.append([parameter.detach().clone() for parameter in trained])
    assert losses[:3] == losses[3:] and all(map(torch.equal, *adapters))
    assert memascend.stats(ours)["ssd_bytes_written"] < 2**20  # Of the weights in 16 bits, none of a step.
    # They stay as they are: a merge is refused, and the weights are read anew.
    with pytest.raises(MemascendError, match=rf"\(frozen_bits={bits}\): leave frozen_bits out"):
        model.merge_adapter()
    # A directory has the values that were trained over, in 16 bits.
    memascend.save_pretrained(model.unload(), tmp_path / "out")
    written = models.load_file(tmp_path / "out" / models.WEIGHTS)
    wanted = {name.replace(".base_layer", ""): value for name, value in theirs.named_parameters() if "lora" not in name}
    assert written.keys() == wanted.keys() and all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_weights_that_are_quantised_do_not_train_later(opened: Callable[..., nn.Module]) -> None:
    layer = opened(models.llama(), 4).model.layers[0].requires_grad_(True)
    for weights in (layer.mlp.parameters(), layer.input_layernorm.parameters()):
        with pytest.raises(MemascendError, match=r"lies beside the store as it was quantised.*leave frozen_bits out"):
            memascend.AdamW(weights)


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"frozen": None}, "quantises frozen weights, not those which are trained: give frozen='store'"),
        ({"frozen": "files"}, "not those whose files stay as they are: give frozen='store'"),
        ({"frozen_bits": 5}, "frozen_bits=5 is not one of None, 4, 8, 'published'"),
        ({"keep_store": True}, "leave out durability and keep_store, or frozen_bits"),
        ({"durability": "step"}, "leave out durability and keep_store, or frozen_bits"),
        ({"dtype": "float32"}, r"no such weights in bfloat16 \(model\.layers.*: give dtype='bfloat16'"),
        ({"experts": "pieces"}, "does not work yet with experts='pieces': leave one of them out"),
        ({"store": "UUID=1234-5678"}, "UUID=1234-5678 is a raw block device: give a directory as store"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_remedy(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path / "model")
    given = {"store": tmp_path / "store", "host_memory": "64MiB", "frozen": "store", "frozen_bits": 4} | options
    with pytest.raises(ValueError, match=told):
        memascend.from_pretrained(tmp_path / "model", **given)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("prepare", "options", "told"),
    [
        (lambda model: model.requires_grad_(True), {}, r"is not trained, and model\.embed_tokens\.weight is: give"),
        (lambda model: model.float(), {}, r"no such weights in bfloat16"),
        (lambda model: model.to("meta"), {}, r"has no values \(it is on meta\): memascend\.from_pretrained"),
        (lambda model: model, {"frozen_bits": 5}, "frozen_bits=5 is not one of None, 4, 8"),
        (lambda model: model, {"durability": "step"}, "leave out durability and keep_store, or frozen_bits"),
        (lambda model: model, {"experts": "pieces"}, "does not work yet with experts='pieces'"),
        (lambda model: model, {"store": "UUID=1234-5678"}, "is a raw block device: give a directory as store"),
    ],
)
def test_a_model_in_memory_that_cannot_be_quantised_is_refused(
    prepare: Callable[[nn.Module], nn.Module], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = prepare(models.llama().requires_grad_(False))
    given = {"store": tmp_path / "store", "host_memory": "64MiB", "frozen_bits": 4} | options
    with pytest.raises(ValueError, match=told):
        memascend.offload(model, **given)
    assert not (tmp_path / "store").exists()
