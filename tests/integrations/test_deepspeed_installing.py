"""Put memascend behind DeepSpeed: by import, by a module that starts scripts, by a hook; and take it away again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deepspeed_parts import ALL_LARGER_PARTS, LARGER_PARTS, PARTS, STREAMS, for_streaming, installed_version
from deepspeed_run import environment

import memascend

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def stock(deepspeed: types.ModuleType) -> Iterator[types.ModuleType]:
    """DeepSpeed as it is without memascend, which comes back after the test."""
    memascend.deepspeed.uninstall()
    yield deepspeed
    memascend.deepspeed.uninstall()
    memascend.deepspeed.install()


def everything() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the attributes of all modules and classes of DeepSpeed, and its state elsewhere."""
    found: dict[tuple[str, str], dict[str, Any]] = {("sys", ""): {n: v for n, v in vars(sys).items() if "deep" in n}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "deepspeed" or module is None:
            continue
        contents = dict(vars(module))
        found[name, ""] = {n: value for n, value in contents.items() if not isinstance(value, types.ModuleType)}
        for cls in contents.values():
            if isinstance(cls, type) and cls.__module__ == name:
                found[name, cls.__qualname__] = dict(vars(cls))
                loaded = vars(cls).get("_loaded_ops")
                if loaded is not None:
                    found[name, f"{cls.__qualname__}._loaded_ops"] = dict(loaded)
    return found


def changed(before: dict[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return where something else is held now: a module, a class and a name."""
    after = everything()
    return {
        (*owner, name)
        for owner, contents in before.items()
        for name in contents.keys() | after.get(owner, {}).keys()
        if contents.get(name, ...) is not after.get(owner, {}).get(name, ...)
    }


def test_uninstall_leaves_nothing(stock: types.ModuleType) -> None:
    assert memascend.deepspeed.installed() == []
    before = everything()
    parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + LARGER_PARTS
    names = {name for _, _, name in changed(before)}
    expected = {"async_io", "is_compatible"}
    if STREAMS:
        expected |= {"_deepspeed_pin_memory_op_module", "step", "has_overflow"}
    assert expected <= names
    installed = everything()
    assert memascend.deepspeed.install() == parts == memascend.deepspeed.installed()
    assert not changed(installed)
    memascend.deepspeed.uninstall()
    assert memascend.deepspeed.installed() == []
    assert not changed(before)
    memascend.deepspeed.uninstall()
    assert not changed(before)


@pytest.fixture(params=[True, False], ids=["at import", "when needed"])
def asks(request: pytest.FixtureRequest, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed find out which operators there are when it is imported, as before 0.19.8, or when it needs to."""
    operators = sys.modules["deepspeed.ops"]
    known = dict(operators.__compatible_ops__)
    if not request.param:
        if "__getattr__" not in vars(operators):
            pytest.skip(f"DeepSpeed {installed_version} does so when it is imported")
        return
    monkeypatch.delattr(operators, "__getattr__", raising=False)
    monkeypatch.setattr(operators, "__compatible_ops__", known, raising=False)


def test_operators_are_known_to_be_there(asks: None, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.ops

    # As on a machine without libaio, whatever this one has.
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    monkeypatch.setattr(type(ALL_OPS["async_io"]), "is_compatible", lambda self, verbose=False: False)
    if hasattr(deepspeed.ops, "__getattr__"):
        vars(deepspeed.ops).pop("__compatible_ops__", None)
    else:
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "async_io", False)
    assert not deepspeed.ops.__compatible_ops__["async_io"]
    memascend.deepspeed.install()
    assert deepspeed.ops.__compatible_ops__["async_io"]
    assert AsyncIOBuilder().load().aio_handle().get_queue_depth() == 128
    with pytest.raises(AttributeError, match=r"uninstall\(\)"):
        _ = AsyncIOBuilder().load().gds_handle
    memascend.deepspeed.uninstall()
    assert not deepspeed.ops.__compatible_ops__["async_io"]
    if hasattr(deepspeed.ops, "__getattr__"):
        vars(deepspeed.ops).pop("__compatible_ops__", None)


def test_collectives_are_known_to_be_missing(
    asks: None, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if not hasattr(deepspeed.ops, "__getattr__"):
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, builder.NAME, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gloo" in memascend.deepspeed.install()
    assert not builder.is_compatible()
    assert not deepspeed.ops.__compatible_ops__[builder.NAME]


def test_a_deepspeed_without_an_operator_for_pinned_memory(
    stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed.ops.op_builder.cpu

    for package in (deepspeed.ops.op_builder, deepspeed.ops.op_builder.cpu):
        monkeypatch.delattr(package, "PinMemoryBuilder", raising=False)
    parts = memascend.deepspeed.install()
    assert "async_io" in parts
    assert "pin_memory" not in parts
    assert not hasattr(sys, "_deepspeed_pin_memory_op_module")


@pytest.mark.parametrize("version", ["0.17.9", "0.20.0", "0.20.1+cpu", "1.0"])
def test_other_versions_are_left_alone(version: str, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "__version__", version)
    before = everything()
    with pytest.warns(UserWarning, match=rf"{version.replace('+', '[+]')}, as it is"):
        assert memascend.deepspeed.install() == []
    assert not changed(before)


#: Pieces of DeepSpeed's code, by the number of larger parts that do without each.
NEEDED = {
    "SwapBufferManager": 0,
    "PartitionedOptimizerSwapper": 0,
    "partition_grads": 1,
    "step": 2,
    "load_checkpoint": 3,
}


@for_streaming
@pytest.mark.parametrize("name", NEEDED)
def test_parts_that_need_unknown_code_are_left_out(
    name: str, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memascend.integrations.deepspeed import versions

    monkeypatch.setitem(versions.KNOWN, name, {"0123456789abcdef"})
    before = everything()
    fitting, left_out = ALL_LARGER_PARTS[: NEEDED[name]], ALL_LARGER_PARTS[NEEDED[name] :]
    with pytest.warns(UserWarning, match=rf"leaves out its {', '.join(left_out)} with .* does not know: {name}\. "):
        parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + fitting
    replaced = {"SwapBufferManager": 1, "partition_grads": 2, "step": 3, "load_checkpoint": 4}
    expected = {changed_name for changed_name, part in replaced.items() if part <= len(fitting)}
    assert replaced.keys() & {changed_name for _, _, changed_name in changed(before)} == expected


@for_streaming
def test_parts_that_cannot_be_imported_are_left_out(stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import gradients

    # Its import asks for the method.
    monkeypatch.delattr(stage3.DeepSpeedZeroOptimizer_Stage3, "partition_grads")
    monkeypatch.delitem(sys.modules, gradients.__name__)
    monkeypatch.delattr(sys.modules[gradients.__package__], "gradients")
    with pytest.warns(UserWarning, match=r"leaves out its gradients, .* does not know: partition_grads\. "):
        parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + ALL_LARGER_PARTS[:1]


def test_a_method_that_is_gone_is_unknown(stock: types.ModuleType) -> None:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import versions

    cls = "DeepSpeedZeroOptimizer_Stage3"
    assert versions.unknown(stage3, cls, ["step", "no_such_method"]) == ["no_such_method"]
    assert versions.unknown(stage3, "NoSuchClass") == ["NoSuchClass"]


TELLS = """
import json, sys
import deepspeed
import memascend.deepspeed
print(json.dumps([__name__, sys.argv, sys.path[0], memascend.deepspeed.installed()]))
sys.exit(3)
"""
WATCHES = """
import json, sys
print(json.dumps([getattr(sys, "hidden", None), sorted(sys.modules.keys() & {"memascend", "torch", "deepspeed"})]))
if "deepspeed" in sys.argv:
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder
    print(json.dumps([sys.modules["memascend.deepspeed".replace(".", ".integrations.")].installed(),
                      AsyncIOBuilder().load().aio_handle.__module__]))
"""


def launched(
    *arguments: object, cwd: Path, python: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True)


LAUNCH = ("-m", "memascend.deepspeed")


def test_a_script_is_started_with_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = folder / "tells.py"
    script.write_text(TELLS)
    done = launched(*LAUNCH, "--local_rank=0", "scripts/tells.py", "a", "b", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    name, argv, first, parts = json.loads(done.stdout.splitlines()[-1])
    assert (name, first) == ("__main__", str(folder))
    assert argv == ["scripts/tells.py", "--local_rank=0", "a", "b"]
    assert set(PARTS + LARGER_PARTS) <= set(parts)


def test_a_module_is_started_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    done = launched(*LAUNCH, "-m", "tells", "a", "--hook", "-m", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    name, argv, _, parts = json.loads(done.stdout.splitlines()[-1])
    assert name == "__main__"
    assert (Path(argv[0]).name, argv[1:]) == ("tells.py", ["a", "--hook", "-m"])
    assert set(PARTS + LARGER_PARTS) <= set(parts)


def test_what_cannot_be_started_is_told() -> None:
    from memascend.integrations.deepspeed.launch import main

    for arguments in ([], ["-m"], ["--no-such-option"]):
        assert main(list(arguments)) == 2


def test_a_missing_script_is_named(deepspeed: types.ModuleType, tmp_path: Path, capsys: Any) -> None:
    from memascend.integrations.deepspeed.launch import main

    missing = str(tmp_path / "no such script.py")
    assert main([missing, "a"]) == 2
    assert missing in capsys.readouterr().err


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = launched(*LAUNCH, "--hook", cwd=tmp_path_factory.mktemp("hook"))
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_the_hook_waits_for_deepspeed(hook: str, tmp_path: Path) -> None:
    (tmp_path / "watches.py").write_text(WATCHES)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.hidden = __name__, __file__\n")
    path = os.pathsep.join([hook, str(hidden), *filter(None, sys.path)])
    done = launched("watches.py", "deepspeed", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    # Nothing is imported for a process that does not import deepspeed, and the other sitecustomize has run.
    assert before == [["sitecustomize", str(hidden / "sitecustomize.py")], []]
    parts, module = after
    assert set(PARTS + LARGER_PARTS) <= set(parts)
    assert module == "memascend.integrations.deepspeed.files"
