"""The pytest plugin of the runs: it puts our classes in the place of a library's, before its tests are imported."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pytest
from _pytest.junitxml import mangle_test_address

from upstream.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The library whose tests run, and whether ours take the place of its classes.
LIBRARY, OURS = "MEMASCEND_UPSTREAM", "MEMASCEND_UPSTREAM_OURS"
#: A file with the names of the only tests that run.
ONLY = "MEMASCEND_UPSTREAM_ONLY"
#: The folder of stand-ins for data sets of the hub.
DATASETS = "MEMASCEND_UPSTREAM_DATASETS"


def _gone(module: str, name: str) -> Any:
    if name.startswith("is_"):
        return lambda: False

    def skip(*_: Any, **__: Any) -> Any:
        pytest.skip(f"the installed version has no {module}.{name}")

    return skip


def _replace(theirs: Any, name: str, ours: Any) -> None:
    for loaded in list(sys.modules.values()):
        named = getattr(loaded, "__name__", "")
        # Not where theirs is defined, nor in our modules, which derive from it.
        defines = named.startswith(("memascend", "upstream")) or named == theirs.__module__
        if isinstance(loaded, types.ModuleType) and not defines and vars(loaded).get(name) is theirs:
            setattr(loaded, name, ours)


_load_from_hub = datasets.load_dataset


def _load_dataset(path: str, name: str | None = None, split: str | None = None, **others: Any) -> Any:
    """Load a data set as `datasets.load_dataset` does, stand-ins for the hub's included."""
    folder = Path(os.environ[DATASETS], path, name or "default")
    if not folder.is_dir():
        return _load_from_hub(path, name, split=split, **others)
    whole = datasets.load_from_disk(str(folder))
    if others.get("streaming"):
        whole = datasets.IterableDatasetDict({part: data.to_iterable_dataset() for part, data in whole.items()})
    if split is None:
        return whole
    part, _, rows = split.partition("[")
    return whole[part].select(range(*slice(*_bounds(rows)).indices(len(whole[part])))) if rows else whole[part]


def _bounds(rows: str) -> list[int | None]:
    return [int(bound) if bound else None for bound in rows.rstrip("]").split(":")]


def pytest_configure() -> None:
    suite = SUITES[os.environ[LIBRARY]]
    for module, name in suite.gone:
        loaded = importlib.import_module(module)
        if not hasattr(loaded, name):
            setattr(loaded, name, _gone(module, name))
    if DATASETS in os.environ:
        _replace(datasets.load_dataset, "load_dataset", _load_dataset)
    if os.environ[OURS] == "yes":
        for (module, name), (our_module, our_name) in suite.substitutes.items():
            theirs = getattr(importlib.import_module(module), name)
            _replace(theirs, name, getattr(importlib.import_module(our_module), our_name))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that are to run, and PEFT's offline: they turn the hub on for a model not seen yet."""
    if ONLY in os.environ:
        only = set(json.loads(Path(os.environ[ONLY]).read_text()))
        items[:] = [item for item in items if _name_of(item) in only]
    for module in list(sys.modules.values()):
        if hasattr(module, "hub_online_once") and getattr(module, "__name__", "").startswith("tests"):
            module.hub_online_once = lambda *_: nullcontext()  # type: ignore[attr-defined]


def _name_of(item: pytest.Item) -> str:
    """Return the name of a test as it is in a report: its class and its own."""
    *folders, name = mangle_test_address(item.nodeid)
    return f"{'.'.join(folders)}::{name}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    offloading = sys.modules.get("upstream.offloading")
    if offloading is not None and isinstance(item, pytest.Function):
        offloading.resuming = "resume_from_checkpoint" in inspect.getsource(item.function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Close the models that a test has left offloaded, and delete their stores."""
    yield
    offloading = sys.modules.get("upstream.offloading")
    if offloading is not None:
        offloading.close_all()
