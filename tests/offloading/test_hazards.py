"""What goes wrong in offloading without care: one test per hazard, each failing without that care."""

from __future__ import annotations

import copy
import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import memascend
from memascend._memascend import KeptStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("products_in_float32")

VOLUME = "memascend.volume"


def step(model: nn.Module, optimizer: memascend.AdamW, architecture: str, number: int) -> torch.Tensor:
    loss = model(**tiny.batch(architecture, number)).loss
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# ---- absent parameters --------------------------------------------------------------------------------------


def test_an_absent_parameter_describes_itself_and_shows_nan(offloaded: Callable[..., nn.Module]) -> None:
    expected = tiny.build("gpt2")
    model = offloaded(tiny.build("gpt2"))
    optimizer = memascend.AdamW(model.parameters())
    for moment in ("before", "after a step", "with gradients"):
        if moment == "after a step":
            step(model, optimizer, "gpt2", 0)
        if moment == "with gradients":
            model(**tiny.batch("gpt2", 1)).loss.backward()
        count = 0
        for (name, parameter), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            count += 1
            assert parameter.shape == other.shape and parameter.dtype == other.dtype, name
            assert parameter.numel() == other.numel() and parameter.device == other.device, name
            assert parameter.requires_grad and parameter.is_leaf and parameter.element_size() == 2
            assert parameter.detach().isnan().all(), f"{name} shows values {moment}"
            if moment == "with gradients":
                assert parameter.grad is not None and parameter.grad.shape == other.shape
                assert parameter.grad.isnan().all(), f"the gradient of {name} shows values"
        assert count > 20
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in expected.parameters())


def test_writing_to_an_absent_parameter_is_told(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"))
    with pytest.raises(RuntimeError):  # one element stands for all
        next(model.parameters()).data.mul_(2)
    next(model.parameters()).data.zero_()  # PyTorch lets this pass
    with pytest.raises(memascend.MemascendError, match="was written to while it was on SSD"):
        model(**tiny.batch("llama", 0))
    tiny.assert_same(tiny.train(model, "llama"), tiny.train(tiny.build("llama"), "llama"))


def test_absent_again_after_a_failed_forward(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[99_999]]))
    with pytest.raises(ValueError, match="stop here"):
        hook = model.model.layers[1].mlp.register_forward_hook(_stop)
        model(**tiny.batch("llama", 0))
    hook.remove()
    assert all(parameter.isnan().all() for parameter in model.parameters())
    tiny.assert_same(tiny.train(model, "llama"), tiny.train(tiny.build("llama"), "llama"))


def _stop(*_: Any) -> None:
    raise ValueError("stop here")


def test_state_dict_is_refused_not_filled_with_nan(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"))
    with pytest.raises(memascend.MemascendError, match="save_pretrained"):
        model.state_dict()
    memascend.close(model)


# ---- weights used elsewhere ---------------------------------------------------------------------------------


class Fused(nn.Module):
    """Reads weights of other modules in its own forward, as Liger's fused linear cross entropy does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCABULARY, tiny.WIDE)
        self.layers = nn.ModuleList(tiny.Block(tiny.WIDE) for _ in range(3))
        self.head = nn.Linear(tiny.WIDE, tiny.VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        # A weight of a layer, outside that layer; a weight of the head, twice.
        x = x + nn.functional.linear(x, self.layers[1].mlp[0].weight[: tiny.WIDE])
        logits = x @ self.head.weight.t() + 0.01 * self.head.weight.sum()
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return tiny.CausalLMOutput(loss=loss, logits=logits)


def fused() -> nn.Module:
    torch.manual_seed(11)
    return Fused().bfloat16()


@pytest.mark.core
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("tight", [True, False])
def test_weights_used_outside_their_module(offloaded: Callable[..., nn.Module], recompute: bool, tight: bool) -> None:
    expected = tiny.train(fused(), "llama")
    model = fused()
    budget = tiny.smallest_budget(model) if tight else "256MiB"
    tiny.assert_same(tiny.train(offloaded(model, recompute=recompute, host_memory=budget), "llama"), expected)


def test_the_head_used_by_the_root_of_a_transformers_model(offloaded: Callable[..., nn.Module]) -> None:
    def patched() -> nn.Module:
        model = tiny.build("llama")

        def forward(input_ids: torch.Tensor, labels: torch.Tensor | None = None, use_cache: bool = False) -> Any:
            hidden = model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
            logits = nn.functional.linear(hidden, model.lm_head.weight)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            return tiny.CausalLMOutput(loss=loss, logits=logits)

        model.forward = forward
        return model

    expected = tiny.train(patched(), "llama")
    tiny.assert_same(tiny.train(offloaded(patched()), "llama"), expected)


@pytest.mark.parametrize("architecture", ["gemma", "gpt2", "qwen3"])
def test_tied_weights_are_one(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    model = tiny.build(architecture)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    offloaded(model, durability="none")
    assert head.weight is embedding.weight
    names = [name for name, _ in memascend.parameters_of(model)]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    before = memascend.stats(model)["store_bytes_used"]
    memascend.AdamW(model.parameters())
    grown = memascend.stats(model)["store_bytes_used"] - before
    assert grown < 12.5 * sum(p.numel() for p in model.parameters()) + 4096 * 4 * 60


def test_tying_across_layers(offloaded: Callable[..., nn.Module]) -> None:
    # One matrix shared by all layers, registered inside each: its gradient is the sum over them.
    def shared() -> nn.Module:
        torch.manual_seed(12)
        model = tiny.Plain()
        for layer in model.layers[1:]:
            layer.mlp[0].weight = model.layers[0].mlp[0].weight
        return model.bfloat16()

    expected = tiny.train(shared(), "plain", accumulate=2)
    for recompute in (True, False):
        model = offloaded(shared(), recompute=recompute)
        tiny.assert_same(tiny.train(model, "plain", accumulate=2), expected)
        memascend.close(model)


# ---- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "plain", "mixtral", "gemma"])
def test_saved_views_outlive_the_release(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    # Without recomputation the graph keeps views of every layer's weights, and the buffers are two.
    expected = tiny.train(tiny.build(architecture), architecture, accumulate=2)
    model = tiny.build(architecture)
    offloaded(model, recompute=False, host_memory=tiny.smallest_budget(model))
    tiny.assert_same(tiny.train(model, architecture, accumulate=2), expected)


def test_a_view_kept_by_the_user_keeps_its_values(offloaded: Callable[..., nn.Module]) -> None:
    model = tiny.build("llama")
    expected = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    kept = []
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, *_: kept.append(module.weight.data))
    offloaded(model, host_memory=tiny.overlapping_budget(model))
    with torch.no_grad():
        model(**tiny.batch("llama", 0))
        hook.remove()
        try:
            for number in range(3):
                model(**tiny.batch("llama", number))
        except memascend.MemascendError as error:
            assert "still alive" in str(error)  # the buffer that the view holds is missing elsewhere
    assert torch.equal(kept[0], expected), "a buffer was reused under a living view"
    kept.clear()
    with torch.no_grad():
        model(**tiny.batch("llama", 0))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "plain"])
def test_backward_twice(offloaded: Callable[..., nn.Module], architecture: str, recompute: bool) -> None:
    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            loss = model(**tiny.batch(architecture, number)).loss
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = run(tiny.build(architecture))
    model = tiny.build(architecture)
    offloaded(model, recompute=recompute, host_memory=tiny.smallest_budget(model))
    tiny.assert_same_weights(run(model), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_losses_kept_across_steps(offloaded: Callable[..., nn.Module], recompute: bool) -> None:
    # A common leak: total += loss. The graphs stay alive, used up or not; the training must not change.
    def run(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        total: Any = 0.0
        kept = []
        for number in range(4):
            kept.append(model(**tiny.batch("llama", 50 + number)).loss)  # never backpropagated
            loss = model(**tiny.batch("llama", number)).loss
            total = total + loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(total.detach()), dict(memascend.parameters_of(model))

    expected_total, expected = run(tiny.build("llama"))
    model = tiny.build("llama")
    offloaded(model, recompute=recompute, host_memory=tiny.smallest_budget(model))
    total, weights = run(model)
    assert total == expected_total
    tiny.assert_same_weights(weights, expected)


# ---- processes ----------------------------------------------------------------------------------------------


class Batches(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in tiny.batch("llama", index, rows=1).items()}


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This process.*:DeprecationWarning")
def test_forked_data_loader_workers(offloaded: Callable[..., nn.Module], store: Path, engine: str) -> None:
    def run(model: nn.Module, workers: int) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        context = "fork" if workers else None
        loader = DataLoader(Batches(), batch_size=2, num_workers=workers, multiprocessing_context=context)
        for _ in range(2):  # workers of the first epoch end while the model is in use
            for inputs in loader:
                model(**inputs).loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return dict(memascend.parameters_of(model))

    expected = run(tiny.build("llama"), 0)
    model = offloaded(tiny.build("llama"), engine=engine)
    tiny.assert_same_weights(run(model, 2), expected)
    assert (store / VOLUME).exists(), "a worker removed its parent's store"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_exits_leaves_the_store_alone(offloaded: Callable[..., nn.Module], store: Path) -> None:
    model = offloaded(tiny.build("llama"))
    child = os.fork()
    if child == 0:
        # Interpreter exit runs atexit handlers and finalisers, as in a worker that calls sys.exit.
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert _wait(child, seconds=20) == 0, "the child hung or crashed"
    assert (store / VOLUME).exists()
    tiny.assert_same(tiny.train(model, "llama"), tiny.train(tiny.build("llama"), "llama"))


def _wait(child: int, seconds: float) -> int | None:
    import signal
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# ---- closing ------------------------------------------------------------------------------------------------


def open_files(store: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(str(store)) or "io_uring" in target:
            found.append(target)
    return found


def native_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in names if name.startswith("memascend")]


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("moment", ["idle", "step deferred", "graph alive", "gradients"])
def test_close_frees_everything(store: Path, engine: str, moment: str) -> None:
    gc.collect()
    assert not open_files(store) and not native_threads()
    threads = threading.active_count()
    model = memascend.offload(
        tiny.build("llama"), store=store, host_memory="256MiB", engine=engine, allocator="pageable", recompute=False
    )
    optimizer = memascend.AdamW(model.parameters())
    loss = model(**tiny.batch("llama", 0)).loss
    if moment != "graph alive":
        loss.backward()
    if moment in ("idle", "step deferred"):
        optimizer.step()
    if moment == "idle":
        optimizer.flush()
    assert open_files(store) and native_threads()
    assert list(store.iterdir())
    memascend.close(model)
    memascend.close(model)
    assert not store.exists()
    if moment == "graph alive":
        with pytest.raises(RuntimeError, match="closed"):
            loss.backward()
    assert not open_files(store)
    assert not native_threads()
    assert threading.active_count() == threads


def test_a_closed_model_cannot_be_used(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny.build("llama"))
    optimizer = memascend.AdamW(model.parameters())
    model(**tiny.batch("llama", 0)).loss.backward()
    memascend.close(model)
    for use in (
        lambda: model(**tiny.batch("llama", 0)),
        lambda: memascend.stats(model),
        lambda: memascend.save_pretrained(model, tmp_path / "out"),
        lambda: dict(memascend.parameters_of(model)),
        lambda: memascend.flush(model),
        lambda: memascend.AdamW(model.parameters()),
    ):
        with pytest.raises(memascend.MemascendError, match="closed"):
            use()
    optimizer.step()  # no gradients are left: nothing to do
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert not (tmp_path / "out").exists()


def test_offloading_twice_is_refused(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny.build("llama"))
    with pytest.raises(memascend.MemascendError, match="already"):
        memascend.offload(model, store=tmp_path / "other", host_memory="256MiB")
    assert not (tmp_path / "other").exists()


def test_a_kept_store_stays_and_is_not_overwritten(store: Path) -> None:
    options: dict[str, Any] = {"store": store, "host_memory": "256MiB", "allocator": "pageable"}
    model = memascend.offload(tiny.build("llama"), keep_store=True, **options)
    optimizer = memascend.AdamW(model.parameters())
    step(model, optimizer, "llama", 0)
    memascend.close(model)
    files = {file.name: file.stat().st_size for file in store.iterdir()}
    assert files[VOLUME] > 4 * 10**6
    assert "memascend.json" in files
    with pytest.raises(memascend.StoreError, match="kept") as caught:
        memascend.offload(tiny.build("llama"), **options)
    assert str(store) in str(caught.value)
    assert {file.name: file.stat().st_size for file in store.iterdir()} == files
    (store / "memascend.json").unlink()
    model = memascend.offload(tiny.build("llama"), **options)
    memascend.close(model)


def test_a_kept_store_holds_the_deferred_update(store: Path) -> None:
    def step_once(model: nn.Module) -> None:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        model(**tiny.batch("plain", 0)).loss.backward()
        optimizer.step()

    expected = tiny.build("plain")
    step_once(expected)
    model = memascend.offload(
        tiny.build("plain"), store=store, host_memory="256MiB", allocator="pageable", keep_store=True
    )
    step_once(model)
    memascend.close(model)
    weight = expected.get_parameter("layers.1.mlp.0.weight").detach()
    kept = torch.empty_like(weight)
    KeptStore([store]).read("layers.1.mlp.0.weight", kept.data_ptr(), kept.nbytes)
    assert torch.equal(kept, weight)


@pytest.mark.core
@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise ValueError('mine')"])
def test_a_process_that_ends_without_close(store: Path, ending: str) -> None:
    # The update of the last step is deferred still; the exit must neither hang, nor crash, nor leave files.
    code = f"""
        import torch, memascend
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        memascend.offload(model, store={str(store)!r}, host_memory="256MiB", allocator="pageable")
        optimizer = memascend.AdamW(model.parameters())
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        {ending}
    """
    done = python(code)
    expected = {"pass": 0, "raise SystemExit(3)": 3}.get(ending, 1)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("Traceback") == (expected == 1), done.stderr
    assert not store.exists()


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=90, env=environment
    )


def test_a_store_in_use_by_another_process(store: Path) -> None:
    code = f"""
        import sys, torch, memascend
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        memascend.offload(model, store={str(store)!r}, host_memory="256MiB", allocator="pageable")
        print("ready", flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "ready\n"
        files = sorted(file.name for file in store.iterdir())
        with pytest.raises(memascend.StoreError, match=f"in use by process {other.pid}") as caught:
            memascend.offload(tiny.build("llama"), store=store, host_memory="256MiB", allocator="pageable")
        assert caught.value.errno == errno.EBUSY and str(store) in str(caught.value)
        assert sorted(file.name for file in store.iterdir()) == files
        # A killed process leaves its files, and they lock no other process out.
        other.kill()
        other.wait()
        assert (store / VOLUME).exists()
        model = memascend.offload(tiny.build("llama"), store=store, host_memory="256MiB", allocator="pageable")
        memascend.close(model)
        assert not (store / VOLUME).exists()
    finally:
        other.kill()
        other.stdin.close()
        other.stdout.close()
        other.wait()


# ---- drives -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Mount a filesystem of some MiB; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(kind: str, mebibytes: int) -> Path:
        where = tmp_path / f"{kind}{len(mounted)}"
        where.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(where)]
        elif kind == "ramfs":
            command = ["mount", "-t", "ramfs", "ramfs", str(where)]
        else:
            image = tmp_path / "image"
            image.write_bytes(b"")
            os.truncate(image, mebibytes << 20)
            lab.must(["mkfs.ext4", "-q", "-m", "0", str(image)])
            command = ["mount", "-o", "loop", str(image), str(where)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lab.unavailable(f"cannot mount here: {done.stderr.strip()}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_drive_is_known_before_training(
    small_drive: Callable[[str, int], Path], offloaded: Callable[..., nn.Module], kind: str
) -> None:
    model = tiny.build("llama")
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    size = sum(value.nbytes for value in weights.values())
    drive = small_drive(kind, (size >> 20) + (8 if kind == "ext4" else 3))
    # Room for the weights, not for the states.
    offloaded(model, store=drive / "store")
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.AdamW(model.parameters())
    assert caught.value.errno == errno.ENOSPC
    tiny.assert_same_weights(dict(memascend.parameters_of(model)), weights)
    memascend.close(model)
    assert not (drive / "store").exists()
    # Not even for the weights: the model stays as it was.
    larger = tiny.build("llama", torch.float32)
    before = {name: value.detach().clone() for name, value in larger.named_parameters()}
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.offload(larger, store=drive / "store", host_memory="256MiB", allocator="pageable")
    assert caught.value.errno == errno.ENOSPC
    assert not (drive / "store").exists()
    tiny.assert_same_weights({name: value.detach() for name, value in larger.named_parameters()}, before)
    assert "_memascend" not in larger.__dict__
    # States alone.
    with pytest.raises(memascend.StoreError, match=str(drive)) as caught:
        memascend.AdamW(larger.parameters(), store=drive / "store", allocator="pageable")
    assert caught.value.errno == errno.ENOSPC
    assert not (drive / "store").exists()


@pytest.mark.root
def test_a_filesystem_without_direct_io(
    small_drive: Callable[[str, int], Path], offloaded: Callable[..., nn.Module]
) -> None:
    drive = small_drive("ramfs", 0)
    model = offloaded(tiny.build("llama"), store=drive / "store")
    stats = memascend.stats(model)
    assert not stats["direct_io"]
    assert any("O_DIRECT" in notice and str(drive) in notice for notice in stats["notices"])
    tiny.assert_same(tiny.train(model, "llama"), tiny.train(tiny.build("llama"), "llama"))


def test_buffered_when_asked(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny.build("llama"), direct=False)
    assert memascend.stats(model)["direct_io"] is False
    assert not memascend.stats(model)["notices"], "what was asked for needs no notice"


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.timeout(60)
def test_a_drive_that_fails_in_training(
    offloaded: Callable[..., nn.Module], store: Path, engine: str, recompute: bool
) -> None:
    model = tiny.build("llama")
    offloaded(model, engine=engine, recompute=recompute, host_memory=tiny.smallest_budget(model))
    optimizer = memascend.AdamW(model.parameters())
    step(model, optimizer, "llama", 0)
    optimizer.flush()
    os.truncate(store / VOLUME, 4096)
    with pytest.raises(memascend.StoreError, match=VOLUME):
        for number in range(1, 4):
            step(model, optimizer, "llama", number)
            optimizer.flush()
    # It stays failed, and closes.
    with pytest.raises(memascend.MemascendError):
        for _ in range(2):
            dict(memascend.parameters_of(model))
    memascend.close(model)
    assert not store.exists()


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for bad in (file, file / "below", Path("/proc/memascend")):
        with pytest.raises(memascend.StoreError, match=str(bad)) as caught:
            memascend.offload(tiny.build("llama"), store=bad, host_memory="256MiB", allocator="pageable")
        assert caught.value.errno
    assert file.read_text() == "mine"
    directory = tmp_path / "d"
    with pytest.raises(memascend.StoreError, match="twice"):
        memascend.offload(tiny.build("llama"), store=[directory, directory], host_memory="256MiB", allocator="pageable")
    assert not directory.exists()
    with pytest.raises(memascend.StoreError, match="at least one"):
        memascend.offload(tiny.build("llama"), store=[], host_memory="256MiB", allocator="pageable")


def test_files_of_others_in_the_directory_stay(offloaded: Callable[..., nn.Module], store: Path) -> None:
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    memascend.close(offloaded(tiny.build("llama")))
    assert [file.name for file in store.iterdir()] == ["notes.txt"]


# ---- budget and arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_budget_too_small_says_the_smallest(store: Path, architecture: str) -> None:
    model = tiny.build(architecture)
    with pytest.raises(memascend.BudgetError) as caught:
        memascend.offload(model, store=store, host_memory="1MiB", allocator="pageable")
    smallest, text = caught.value.smallest_bytes, str(caught.value)
    assert str(smallest) in text and "1.0 MiB" in text
    assert "weights of" in text, "the message says what asks for it"
    assert not store.exists() and "_memascend" not in model.__dict__
    with pytest.raises(memascend.BudgetError):
        memascend.offload(model, store=store, host_memory=smallest - 1, allocator="pageable")
    memascend.offload(model, store=store, host_memory=smallest, allocator="pageable")
    optimizer = memascend.AdamW(model.parameters())
    step(model, optimizer, architecture, 0)
    stats = memascend.stats(model)
    assert stats["host_bytes_peak"] <= stats["host_bytes_reserved"] <= smallest
    memascend.close(model)


class Towers(nn.Module):
    """Large modules of one size, one after another, none of them repeated: one buffer for all at the least."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1024, bias=False)
        self.second = nn.Linear(1024, 1024, bias=False)
        self.third = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)).tanh()).float().square().mean()


class Tall(nn.Sequential):
    """Many layers of one size, and two buffers for them."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().mean()


@pytest.mark.parametrize("kind", [Towers, Tall])
@pytest.mark.parametrize("flush", [False, True])
def test_buffers_still_being_written_back_are_waited_for(
    offloaded: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[nn.Module],
    flush: bool,
) -> None:
    # Collecting garbage must not be what gives the drive its time.
    monkeypatch.setattr(gc, "collect", lambda: 0)

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            model(torch.full((2, 1024), 0.1 * (number + 1), dtype=torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if flush:
                optimizer.flush()
        return dict(memascend.parameters_of(model))

    def fresh() -> nn.Module:
        torch.manual_seed(4)
        return kind().bfloat16()

    expected = run(fresh())
    model = fresh()
    offloaded(model, host_memory=tiny.smallest_budget(model))
    tiny.assert_same_weights(run(model), expected)
    memascend.save_pretrained(model, tmp_path / "out")
    tiny.assert_same_weights(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_parameters_that_cannot_be_trained(store: Path) -> None:
    for model in (nn.Linear(256, 256, device="meta"), nn.Linear(256, 256).double()):
        untouched = copy.copy(model.__dict__)
        with pytest.raises(ValueError, match=r"meta|float64"):
            memascend.offload(model, store=store, host_memory="256MiB", allocator="pageable")
        assert model.__dict__ == untouched
        assert not store.exists()
    for bad in ({"engine": "warp"}, {"allocator": "cloud"}, {"host_memory": "8 parsecs"}, {"host_memory": 0}):
        with pytest.raises(ValueError):
            memascend.offload(
                nn.Linear(256, 256), **{"store": store, "host_memory": "256MiB", "allocator": "pageable"} | bad
            )
        assert not store.exists()


def test_a_cache_with_recomputation_is_refused(offloaded: Callable[..., nn.Module]) -> None:
    # Recomputing would fill it twice.
    model = offloaded(tiny.build("llama"))
    with pytest.raises(memascend.MemascendError, match="use_cache=False"):
        model(**tiny.batch("llama", 0), use_cache=True)


def test_an_undeterministic_forward_is_told(offloaded: Callable[..., nn.Module]) -> None:
    class Fickle(tiny.Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) if self.calls % 2 else super().forward(x).sin()

    model = nn.Sequential(Fickle(256), Fickle(256)).bfloat16()
    offloaded(model)
    with pytest.raises(memascend.MemascendError, match="not deterministic"):
        model(torch.ones(1, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()


# ---- one buffer for all layers by turns ---------------------------------------------------------------------


def wide(tie: bool = False) -> nn.Module:
    """A Llama whose embedding, head and layers are each too large to share a unit."""
    torch.manual_seed(3)
    config = LlamaConfig(
        **tiny.SMALL_DECODER
        | {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 128},
        tie_word_embeddings=tie,
    )
    return LlamaForCausalLM(config).bfloat16().train()


def wide_steps(model: nn.Module, **backward: Any) -> list[torch.Tensor]:
    optimizer = memascend.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(3):
        tokens = torch.randint(3, 2048, (2, 80), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if backward:
            loss.backward(**backward)
            optimizer.zero_grad()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("options", [{}, {"recompute": False}], ids=["recomputed", "saved"])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_units_by_turns_train_like_in_memory(
    offloaded: Callable[..., nn.Module], options: dict[str, Any], tie: bool, twice: bool
) -> None:
    backward = {"retain_graph": True} if twice else {}
    expected = wide_steps(wide(tie), **backward)
    model = wide(tie)
    budget = tiny.smallest_budget(model)
    assert budget < tiny.overlapping_budget(model)
    offloaded(model, host_memory=budget, **options)
    [line] = [line for line in memascend.offload_of(model).plan.units if line.nbytes > 1 << 20]
    assert line.count == 1
    assert all(torch.equal(a, b) for a, b in zip(wide_steps(model, **backward), expected, strict=True))


def test_an_abandoned_backward_pass_gives_the_only_buffer_back(offloaded: Callable[..., nn.Module]) -> None:
    model = wide()
    offloaded(model, host_memory=tiny.smallest_budget(model))
    tokens = torch.arange(160).view(2, 80)

    class Broken(Exception):
        pass

    def fail(_: torch.Tensor) -> None:
        raise Broken

    hook = model.model.layers[1].self_attn.q_proj.weight.register_hook(fail)
    abandoned = model(input_ids=tokens, labels=tokens).loss
    with pytest.raises(Broken):
        abandoned.backward()
    hook.remove()
    # The loss of the failed pass still lives, and with it what was recomputed for it.
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert abandoned.isfinite()


def test_layers_that_share_their_weights_with_the_embedding_have_buffers_of_their_own(
    offloaded: Callable[..., nn.Module],
) -> None:
    class Block(nn.Module):
        def __init__(self, shared: nn.Parameter) -> None:
            super().__init__()
            self.inner = nn.Linear(1024, 1024, bias=False)
            self.inner2 = nn.Linear(1024, 1024, bias=False)
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner2(self.inner(x) @ self.shared.t() @ self.shared)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1500, 1024)
            self.layers = nn.ModuleList(Block(self.embedding.weight) for _ in range(3))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return x.float().square().mean()

    torch.manual_seed(0)
    reference = Net().bfloat16()
    model = copy.deepcopy(reference)
    offloaded(model, host_memory=tiny.smallest_budget(model))
    tokens = torch.arange(64)
    for net in (reference, model):
        optimizer = memascend.AdamW(net.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            loss = net(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if net is reference:
            expected = losses
    assert losses == expected


def test_a_layer_that_another_reads_by_turns_is_told_the_budget_that_works(
    offloaded: Callable[..., nn.Module],
) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1024, 1024, bias=False)
            self.second = nn.Linear(1024, 1024, bias=False)
            self.third = nn.Linear(1024, 900, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.third.weight  # in use until the pass ends
            return (self.second(self.first(x)) @ weight.t()).float().square().mean()

    model = Reader().bfloat16()
    enough = tiny.overlapping_budget(model)
    offloaded(model, host_memory=tiny.smallest_budget(model))
    x = torch.randn(4, 1024).bfloat16()
    with pytest.raises(memascend.MemascendError, match="raise host_memory to") as caught:
        model(x)
    assert memascend.format_size(enough) in str(caught.value)
    memascend.close(model)
    again = Reader().bfloat16()
    offloaded(again, host_memory=enough)
    again(x).backward()


@pytest.mark.parametrize("architecture", ["llama", "plain"])
def test_a_forward_without_a_backward_leaves_nothing(offloaded: Callable[..., nn.Module], architecture: str) -> None:
    model = offloaded(tiny.build(architecture))
    model(**tiny.batch(architecture, 0))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "Recomputation"]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loop_that_calls_the_models_parts(offloaded: Callable[..., nn.Module], recompute: bool) -> None:
    def train(model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        optimizer, losses = memascend.AdamW(model.parameters(), lr=3e-3), []
        for step in range(3):
            inputs = tiny.batch("llama", step)["input_ids"]
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            loss = nn.functional.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), inputs.flatten())
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses, dict(memascend.parameters_of(model))

    losses, weights = train(tiny.build("llama"))
    actual, kept = train(offloaded(tiny.build("llama"), recompute=recompute))
    assert all(torch.equal(one, other) for one, other in zip(actual, losses, strict=True))
    tiny.assert_same_weights(kept, weights)


def test_a_closed_model_is_used_again_only_by_resume(store: Path) -> None:
    options: dict[str, Any] = {"store": store, "host_memory": "256MiB", "allocator": "pageable"}
    model = memascend.offload(tiny.build("plain"), **options, keep_store=True)
    expected = tiny.logits(model, "plain")
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="the model was closed"):
        memascend.offload(model, store=store.with_name("other"), host_memory="256MiB")
    with pytest.raises(memascend.MemascendError, match="the model was closed"):
        tiny.logits(model, "plain")
    resumed = memascend.resume(store, model=model, host_memory="256MiB", allocator="pageable").model
    assert torch.equal(tiny.logits(resumed, "plain"), expected)
    memascend.close(resumed)
