"""Fixtures: offloaded models that are closed after the test, and requirements of some tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import fake_cuda
import float32_products
import forked
import forked_workers
import pytest
import requirements
import sampling
import torch
from simulated_device import SimulatedDevice

import memascend
from memascend.layout import tables
from memascend.session import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

AMPLE = "256MiB"

# Until all tests are collected: collections would look at a growing million of objects, of which almost all stay.
gc.disable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have products of half precision be quick on every processor, but in modules that are marked."""
    own = request.node.get_closest_marker("own_products")
    with float32_products.as_pytorch() if own else float32_products.in_float32():
        yield


@pytest.fixture(autouse=True, scope="session")
def _signals() -> None:
    # Under `nohup` it is ignored, and commands leave it so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _accelerate() -> Iterator[None]:
    """Have no test find the process-wide state that accelerate, and with it the Trainer, keeps of another one."""
    yield
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def _engine_of_deepspeed() -> Iterator[None]:
    """End the engine that a process's tests behind DeepSpeed share."""
    yield
    if files := sys.modules.get("memascend.integrations.deepspeed.files"):
        files._engine = None


@pytest.fixture(autouse=True)
def _models_leave_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close models that a failed test has left open on a device, where they would limit the next one."""
    yield
    if request.node.get_closest_marker("gpu"):
        for holder in list(runtime._open_holders):
            holder.close(failed=True)


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables of the size of tests, with blocks of some pages."""
    monkeypatch.setattr(tables, "TABLE_BYTES_MIN", 32 * 1024)
    monkeypatch.setattr(tables, "BLOCK_BYTES_MAX", 0)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 64 * 1024)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def offloaded(store: Path) -> Iterator[Callable[..., nn.Module]]:
    """Offload a model, in pageable memory (limits on locking differ between hosts) and an ample budget by default."""
    models: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        models.append(model)
        return memascend.offload(model, **{"store": store, "host_memory": AMPLE, "allocator": "pageable"} | options)

    yield offload
    for model in models:
        memascend.close(model)


@pytest.fixture
def small_experts_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small experts be read one by one where that is asked for, although it takes more memory."""
    monkeypatch.setattr("memascend.memory_plan.experts.take_less", lambda *_: True)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.build(tmp_path_factory.mktemp("cudart"))


@pytest.fixture
def fake(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake_cuda.Fake:
    """A CUDA runtime of this test's own, whose streams are queues."""
    own = tmp_path / "cudart"
    own.mkdir()
    monkeypatch.setenv(fake_cuda.VARIABLE, str(shutil.copy(library, own)))
    # Inputs of every layer, however small.
    monkeypatch.setattr("memascend.autograd.recompute.STASH_FROM_BYTES", 1)
    fake = fake_cuda.Fake()
    fake.set("lazy", 1)
    return fake


@pytest.fixture
def on_device(fake: fake_cuda.Fake, store: Path) -> Iterator[Callable[..., nn.Module]]:
    """Offload a model to a simulated device, with ample budgets by default; in the end nothing is left there."""
    models: list[nn.Module] = []

    def offload(model: nn.Module, **options: Any) -> nn.Module:
        models.append(model)
        usual = {"store": store, "host_memory": "256MiB", "device": SimulatedDevice(), "device_memory": "1GiB"}
        return memascend.offload(model, **usual | options)

    yield offload
    for model in models:
        memascend.close(model)
    gc.collect()  # objects that an exception caught by a test refers to
    fake.assert_clean()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the number of processes that run tests."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run tests in N processes forked from this")


def pytest_configure() -> None:
    """Refuse a MEMASCEND_REQUIRE that cannot be understood before any test runs."""
    requirements.required()


def pytest_report_header() -> str | None:
    """Say which tests a sampled run has."""
    return sampling.report()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run tests in several processes, if that is asked for."""
    count = session.config.getoption("workers")
    if not count or session.config.getoption("collectonly") or session.testsfailed:
        return None
    forked_workers.run(session, count)
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run some cases of the longest tests, where `make test` asks for that."""
    sampling.sample(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave objects imported by now out of all collections: there are a million objects, and tests ask for many."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if session.config.getoption("workers") and not session.config.getoption("collectonly"):
        forked.begin(session.config._tmp_path_factory.getbasetemp() / "programs.txt")  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    """Leave nothing that extension modules would report as leaked."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail tests that need root or a GPU where there is none."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        requirements.unmet("root", "this is an ordinary user")
    if item.get_closest_marker("gpu") and not _has_gpu():
        requirements.unmet("gpu", "PyTorch finds no CUDA device")
    if item.get_closest_marker("rehearsal") and not _has_gpu():
        pytest.skip("PyTorch finds no CUDA device; `make rehearse` makes a stand-in")
    on_device = item.get_closest_marker("gpu") or item.get_closest_marker("rehearsal")
    if on_device and item.config.getoption("workers"):
        requirements.unmet("gpu", "a forked process cannot use the CUDA device: run `pytest -m gpu` without --workers")


@cache
def _has_gpu() -> bool:
    with warnings.catch_warnings():
        # A driver too old for torch is told as a warning, and means that there is none to use.
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()
