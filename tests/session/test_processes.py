"""Processes that fork, end, or are killed, models that are closed: no hang, no crash, and no file that stays."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import forked
import pytest
import tiny_models
import torch
from processes import forget_earlier, native_threads, native_threads_end, open_files, python
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memascend
from memascend._memascend import ClosedStore, format_device

if TYPE_CHECKING:
    from collections.abc import Callable


# ---- processes ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _earlier() -> None:
    forget_earlier()


class Batches(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in tiny_models.batch("llama", index, rows=1).items()}


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

    expected = run(tiny_models.build("llama"), 0)
    model = offloaded(tiny_models.build("llama"), engine=engine)
    tiny_models.assert_same_weights(run(model, 2), expected)
    assert (store / faults.VOLUME).exists(), "a worker removed its parent's store"


#: A run whose DataLoader's worker outlives it: it works on a batch when its parent is killed.
WITH_WORKER = """
    import os, sys, time, torch, memascend
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            if index > 2:
                time.sleep(600)
            return torch.full((256,), 0.1), os.getpid()
    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    if __name__ == "__main__":
        store, engine = sys.argv[1:]
        model = memascend.offload(model(), store=store, host_memory="64MiB", allocator="pageable", engine=engine)
        optimizer = memascend.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork")
        batches = iter(loader)  # Its end would end the worker.
        for _ in range(2):
            batch, worker = next(batches)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            memascend.flush(model)
        print(worker.item(), flush=True)
        sys.stdin.read()
"""


def resume_beside_a_worker(store: Path | str, engine: str) -> None:
    """Kill a run, and resume it while a worker that it has forked lives."""
    command = ["-c", textwrap.dedent(WITH_WORKER), store, engine]
    other = forked.Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    worker = 0
    try:
        worker = int(other.stdout.readline())
        with pytest.raises(memascend.StoreError, match="in use"):
            memascend.can_resume(store)
        other.kill()
        other.wait()
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        resumed = memascend.resume(store, model=layers, allocator="pageable")
        os.kill(worker, 0)  # Raises if the worker has gone.
        assert resumed.steps == 2
        memascend.close(resumed.model)
    finally:
        other.kill()
        other.stdin.close()
        other.stdout.close()
        other.wait()
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_worker_that_outlives_its_run_does_not_keep_the_store(store: Path, engine: str) -> None:
    resume_beside_a_worker(store, engine)


@pytest.mark.root
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_worker_that_outlives_its_run_does_not_keep_the_device(engine: str) -> None:
    with faults.loop_device(64 << 20) as device:
        uuid = format_device(device.path)[0]
        resume_beside_a_worker(f"UUID={uuid}", engine)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_exits_leaves_the_store_alone(offloaded: Callable[..., nn.Module], store: Path) -> None:
    model = offloaded(tiny_models.build("llama"))
    child = os.fork()
    if child == 0:
        # Interpreter exit runs atexit handlers and finalisers, as in a worker that calls sys.exit.
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    assert _wait(child, seconds=20) == 0, "the child hung or crashed"
    assert (store / faults.VOLUME).exists()
    tiny_models.assert_same(tiny_models.train(model, "llama"), tiny_models.train(tiny_models.build("llama"), "llama"))


def _use_in_child(model: nn.Module, use: Callable[[nn.Module], Any]) -> str:
    """Fork, use the model in the child, and return its exception."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use(model)
            told = "nothing was raised"
        except memascend.MemascendError as error:
            told = str(error)
        except BaseException as error:
            told = repr(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    assert _wait(child, seconds=30) == 0, "the child hung or crashed"
    with os.fdopen(reading) as pipe:
        return pipe.read()


USES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model(**tiny_models.batch("llama", 0)),
    "a layer": lambda model: model.model.layers[0](torch.zeros(1, 4, tiny_models.WIDE, dtype=torch.bfloat16)),
    "weight": lambda model: model.lm_head.weight[0].sum(),
    "data": lambda model: model.model.norm.weight.data.zero_(),
    "state_dict": lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    "parameters_of": lambda model: list(memascend.parameters_of(model)),
    "stats": memascend.stats,
    "flush": memascend.flush,
    "save_pretrained": lambda model: memascend.save_pretrained(model, "never written"),
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This process.*:DeprecationWarning")
@pytest.mark.parametrize("durability", ["none", "step"])
def test_a_forked_child_that_uses_the_model_gets_an_error(offloaded: Callable[..., nn.Module], durability: str) -> None:
    """Buffers, threads and files are the parent's: the child would crash, wait for ever, or write to the store."""
    model = offloaded(tiny_models.build("llama"), durability=durability)
    trace = tiny_models.train(model, "llama")
    for name, use in USES.items():
        assert "was forked from the one that offloaded the model" in _use_in_child(model, use), name
    assert _use_in_child(model, memascend.close) == "nothing was raised"
    tiny_models.assert_same_weights(dict(memascend.parameters_of(model)), trace.weights)
    tiny_models.step(model, memascend.AdamW(model.parameters()), "llama", 5)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This process.*:DeprecationWarning")
def test_a_forked_child_that_uses_states_on_a_store_gets_an_error(tmp_path: Path) -> None:
    """The model is in memory, and the child's own; the store of its optimizer's states is not."""
    model = tiny_models.build("plain")
    optimizer = memascend.AdamW(model.parameters(), store=tmp_path / "states")
    tiny_models.step(model, optimizer, "plain", 0)
    model(**tiny_models.batch("plain", 1)).loss.backward()
    for use in (optimizer.step, optimizer.state_dict):
        told = _use_in_child(model, lambda _, use=use: use())  # type: ignore[misc]
        assert "was forked from the one that offloaded the model" in told, use
    optimizer.step()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:This process.*:DeprecationWarning")
def test_a_worker_that_reads_a_weight_ends_its_loader(offloaded: Callable[..., nn.Module]) -> None:
    model = offloaded(tiny_models.build("llama"))

    class Reading(Batches):
        def __getitem__(self, index: int) -> Any:
            return model.lm_head.weight[index].sum()

    loader = DataLoader(Reading(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(memascend.MemascendError, match="read what a DataLoader's worker"):
        list(loader)


def _wait(child: int, seconds: float) -> int | None:
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


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("moment", ["idle", "step deferred", "graph alive", "gradients"])
def test_close_frees_everything(store: Path, engine: str, moment: str) -> None:
    threads = threading.active_count()
    model = memascend.offload(
        tiny_models.build("llama"),
        store=store,
        host_memory="256MiB",
        engine=engine,
        allocator="pageable",
        recompute=False,
    )
    optimizer = memascend.AdamW(model.parameters())
    loss = model(**tiny_models.batch("llama", 0)).loss
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
    assert native_threads_end()
    assert threading.active_count() == threads


def test_a_closed_model_cannot_be_used(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny_models.build("llama"))
    optimizer = memascend.AdamW(model.parameters())
    model(**tiny_models.batch("llama", 0)).loss.backward()
    memascend.close(model)
    for use in (
        lambda: model(**tiny_models.batch("llama", 0)),
        lambda: memascend.stats(model),
        lambda: memascend.save_pretrained(model, tmp_path / "out"),
        lambda: dict(memascend.parameters_of(model)),
        lambda: memascend.flush(model),
        lambda: memascend.AdamW(model.parameters()),
    ):
        with pytest.raises(memascend.MemascendError, match="closed"):
            use()
    optimizer.step()  # no gradients are left: nothing to do
    for parameter in model.parameters():
        with pytest.raises(memascend.MemascendError, match="closed"):
            parameter.isnan()
    assert not (tmp_path / "out").exists()


def test_offloading_twice_is_refused(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(tiny_models.build("llama"))
    with pytest.raises(memascend.MemascendError, match="already"):
        memascend.offload(model, store=tmp_path / "other", host_memory="256MiB")
    assert not (tmp_path / "other").exists()


def test_a_kept_store_stays_and_is_not_overwritten(store: Path) -> None:
    options: dict[str, Any] = {"store": store, "host_memory": "256MiB", "allocator": "pageable"}
    model = memascend.offload(tiny_models.build("llama"), keep_store=True, **options)
    optimizer = memascend.AdamW(model.parameters())
    tiny_models.step(model, optimizer, "llama", 0)
    memascend.close(model)
    files = {file.name: file.stat().st_size for file in store.iterdir()}
    assert files[faults.VOLUME] > 4 * 10**6
    assert "memascend.json" in files
    with pytest.raises(memascend.StoreError, match="kept") as caught:
        memascend.offload(tiny_models.build("llama"), **options)
    assert str(store) in str(caught.value)
    assert {file.name: file.stat().st_size for file in store.iterdir()} == files
    (store / "memascend.json").unlink()
    model = memascend.offload(tiny_models.build("llama"), **options)
    memascend.close(model)


def test_a_kept_store_holds_the_deferred_update(store: Path) -> None:
    def step_once(model: nn.Module) -> None:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        model(**tiny_models.batch("plain", 0)).loss.backward()
        optimizer.step()

    expected = tiny_models.build("plain")
    step_once(expected)
    model = memascend.offload(
        tiny_models.build("plain"), store=store, host_memory="256MiB", allocator="pageable", keep_store=True
    )
    step_once(model)
    memascend.close(model)
    weight = expected.get_parameter("layers.1.mlp.0.weight").detach()
    kept = torch.empty_like(weight)
    ClosedStore([store]).read("layers.1.mlp.0.weight", kept.data_ptr(), kept.nbytes)
    assert torch.equal(kept, weight)


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise ValueError('mine')"])
@pytest.mark.parametrize("keep_store", [None, pytest.param(False, marks=pytest.mark.soak)])
def test_a_process_that_ends_without_close(store: Path, ending: str, keep_store: bool | None) -> None:
    # The update of the last step is deferred still; the exit must neither hang, nor crash, nor leave files that hold
    # no step.
    code = f"""
        import torch, memascend
        def main():
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
            options = {{"host_memory": "256MiB", "allocator": "pageable", "keep_store": {keep_store}}}
            memascend.offload(model, store={str(store)!r}, **options)
            optimizer = memascend.AdamW(model.parameters())
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
        main()
        {ending}
    """
    done = python(code)
    expected = {"pass": 0, "raise SystemExit(3)": 3}.get(ending, 1)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("Traceback") == (expected == 1), done.stderr
    if expected == 1 or keep_store is False:
        assert not store.exists()
        return
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    optimizer = memascend.AdamW(reference.parameters())
    reference(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    again = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    resumed = memascend.resume(store, model=again, allocator="pageable")
    assert resumed.steps == 1, "a program that ends in peace has finished its last step"
    tiny_models.assert_same_weights(dict(memascend.parameters_of(again)), dict(reference.named_parameters()))
    memascend.close(again)


def test_a_store_in_use_by_another_process(store: Path) -> None:
    code = f"""
        import os, sys, torch, memascend
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        memascend.offload(model, store={str(store)!r}, host_memory="256MiB", allocator="pageable")
        print(os.getpid(), flush=True)
        sys.stdin.read()
    """
    other = forked.Program(["-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None
    try:
        number = int(other.stdout.readline())
        files = sorted(file.name for file in store.iterdir())
        with pytest.raises(memascend.StoreError, match=f"in use by process {number}") as caught:
            memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", allocator="pageable")
        assert caught.value.errno == errno.EBUSY and str(store) in str(caught.value)
        assert sorted(file.name for file in store.iterdir()) == files
        # A killed process leaves its files, and they lock no other process out.
        other.kill()
        other.wait()
        assert (store / faults.VOLUME).exists()
        model = memascend.offload(tiny_models.build("llama"), store=store, host_memory="256MiB", allocator="pageable")
        memascend.close(model)
        assert not (store / faults.VOLUME).exists()
    finally:
        other.kill()
        other.stdin.close()
        other.stdout.close()
        other.wait()


def test_a_program_whose_backward_pass_has_failed_ends_without_a_crash(tmp_path: Path) -> None:
    done = python(f"""
        import memascend, torch
        from torch import nn

        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        memascend.offload(model, store={str(tmp_path)!r}, host_memory="64MiB", allocator="pageable")

        def fail(_):
            raise RuntimeError("stop")

        model[3].weight.register_post_accumulate_grad_hook(fail)
        try:
            model(torch.ones(2, 64)).sum().backward()
        except RuntimeError as error:
            print(error)
    """)
    assert (done.returncode, done.stdout) == (0, "stop\n"), done.stderr
