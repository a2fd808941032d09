"""`memascend doctor`: its findings on a machine, and on faults."""

import json
import os
import subprocess
import sys

import faults
import pytest
import tiny_models
import torch

import memascend
from memascend._memascend import format_device
from memascend.cli import main
from memascend.doctor import findings, software, storage, system
from memascend.hardware import drives, threads, waits
from memascend.hardware.processors import Processors


def test_the_page_of_this_machine(tmp_path, capsys):
    assert main.main(["doctor", "--store", str(tmp_path), "--no-measure"]) == 0
    page = capsys.readouterr().out
    subjects = (
        "memascend",
        "Python",
        "torch",
        "kernel",
        "io_uring",
        "page-locked memory",
        "memory",
        "processor",
        "threads",
        "waits",
        "GPU",
    )
    for subject in (*subjects, str(tmp_path)):
        assert any(line.split("  ")[1:] and subject in line for line in page.splitlines()), subject
    assert page.splitlines()[-1].startswith("0 problems")
    # Its temporary files are gone.
    assert not list(tmp_path.iterdir())


def test_threads_and_waits(tmp_path, monkeypatch, capsys):
    def told(*variables):
        for name in (threads.VARIABLE, *waits.VARIABLES):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables:
            monkeypatch.setenv(name, value)
        code = main.main(["doctor", "--store", str(tmp_path), "--no-measure", "--json"])
        lines = {line["subject"]: line for line in json.loads(capsys.readouterr().out)}
        return code, lines["threads"], lines["waits"]

    monkeypatch.setattr(threads, "processors", lambda: Processors(16, 16))
    monkeypatch.setattr(system, "processors", lambda: Processors(16, 16))
    before = torch.get_num_threads()
    try:
        _, found, waiting = told()
        assert "4 update weights (12 where a GPU computes)" in found["text"]
        assert waiting["text"] == "PyTorch's one thread waits for no other"
        _, found, waiting = told((threads.VARIABLE, "torch=3,update=2"))
        assert "PyTorch computes with 3, 2 update weights (2 where" in found["text"]
        assert "spin for " in waiting["text"] and "(libgomp.so.1); beside busy programs" in waiting["text"]
        _, _, waiting = told(("OMP_WAIT_POLICY", "passive"))
        assert waiting["text"].endswith("as OMP_WAIT_POLICY=passive says")
        monkeypatch.setattr(system, "processors", lambda: Processors(16, 16, 2.5, "a cgroup"))
        _, found, _ = told()
        assert found["level"] == "note" and "3 take turns on 2" in found["text"]
        assert "torch.set_num_threads(2)" in found["remedy"]
        monkeypatch.setattr(waits, "is_gnu", lambda _: False)
        monkeypatch.setattr(waits, "spin_seconds", lambda: 0.2)
        _, _, waiting = told()
        assert waiting["level"] == "note" and "OMP_WAIT_POLICY=passive" in waiting["remedy"]
    finally:
        torch.set_num_threads(before)
    monkeypatch.setenv(threads.VARIABLE, "threads=2")
    assert main.main(["doctor"]) == main.BAD_INPUT
    assert "MEMASCEND_THREADS has 'threads=2'" in capsys.readouterr().err


def test_a_missing_store_is_a_problem(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert main.main(["doctor", "--store", str(missing), "--no-measure", "--json"]) == 1
    (found,) = [line for line in json.loads(capsys.readouterr().out) if line["level"] == "problem"]
    assert found["subject"] == str(missing)
    assert str(missing) in found["text"]
    assert found["remedy"]


def test_a_drive_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MEASURED_BYTES", 64 << 20)
    monkeypatch.setattr(storage, "MEASURED_SECONDS", 0.1)
    timed = [line for line in storage.storage(tmp_path) if "GB/s" in line.text]
    assert [line.level for line in timed] == ["ok"]
    assert not list(tmp_path.iterdir())


def test_versions_are_those_of_the_wheel():
    supported = software._supported()
    assert supported["torch"].contains("2.8.0") and not supported["torch"].contains("2.7.1")
    assert supported["deepspeed"].contains("0.19.8") and not supported["deepspeed"].contains("0.20.0")


def test_versions_that_do_not_fit(monkeypatch):
    versions = {"torch": "2.7.1", "numpy": "2.1.0", "transformers": "4.40.0", "memascend": "0.1.0"}

    def version(name):
        if name in versions:
            return versions[name]
        raise software.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.importlib.metadata, "version", version)
    levels = {line.subject: line for line in software.software()}
    assert levels["torch"].level == "problem" and ">=2.8" in levels["torch"].remedy
    assert levels["numpy"].level == "ok"
    assert levels["transformers"].level == "note"
    # A part that is not installed is no fault.
    assert "deepspeed" not in levels
    del versions["numpy"]
    assert {line.subject: line for line in software.software()}["numpy"].level == "problem"


def test_a_free_threaded_python_is_noted(monkeypatch):
    def python():
        (line,) = [line for line in software.software() if line.subject == "Python"]
        return line

    for disabled in (None, 0):
        monkeypatch.setattr(software.sysconfig, "get_config_var", {"Py_GIL_DISABLED": disabled}.__getitem__)
        assert python().level == "ok"
    monkeypatch.setattr(software.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.__getitem__)
    assert python().level == "note"
    assert "free-threaded" in python().text and "PYTHON_GIL=0" in python().remedy


def test_what_the_system_refuses(monkeypatch):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(system, "FileEngine", refuse)
    monkeypatch.setattr(system, "HostBuffer", refuse)
    monkeypatch.setattr(system.matmul_rates, "is_slow", lambda dtype: True)
    monkeypatch.setattr(system.memory_limits, "available_memory", lambda: (1 << 30, "the limit of a cgroup"))
    found = {line.subject: line for line in system.system()}
    for subject, remedy in (
        ("io_uring", "seccomp"),
        ("page-locked memory", "ulimit -l"),
        ("bfloat16", "float32"),
        ("memory", "container"),
    ):
        assert found[subject].level == "note"
        assert remedy in found[subject].remedy
    assert "Operation not permitted" in found["io_uring"].text
    assert "cgroup" in found["memory"].text


@pytest.mark.parametrize(
    ("told", "level"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "note"),
        (None, "note"),
    ],
)
def test_huge_pages_are_looked_for(told, level, tmp_path, monkeypatch):
    monkeypatch.setattr(system, "HUGE_PAGES", tmp_path / "enabled")
    if told is not None:
        system.HUGE_PAGES.write_text(told)
    (found,) = [line for line in system.system() if line.subject == "huge pages"]
    assert found.level == level
    assert (found.remedy != "") == (level == "note") == (str(tmp_path) in found.remedy)


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "overlay", "btrfs", "ext4"])
def test_filesystems_have_pitfalls(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(drives, "mounted", lambda path: (kind, "server:/export"))
    monkeypatch.setattr(storage, "SMALL_BYTES", 0)
    first = next(storage.storage(tmp_path, measure=False))
    assert f"{kind} on server:/export" in first.text
    assert (first.level == "note") == (kind in storage.PITFALLS) == (kind != "ext4")


@pytest.mark.root
def test_a_raw_device_and_its_disk(tmp_path):
    with faults.loop_device(64 << 20) as device:
        assert storage.disk_of(device.path) == device.path.name
        # It was not formatted for memascend.
        found = list(storage.storage(device.path, measure=False))
        assert found[-1].level == "problem"
    assert storage.disk_of(tmp_path / "missing") is None


@pytest.mark.root
def test_a_store_on_a_device_is_no_problem_and_stays(tmp_path):
    with faults.loop_device(192 << 20) as device:
        format_device(device.path)
        model = memascend.offload(tiny_models.build("llama"), store=device.path, host_memory="64MiB", keep_store=True)
        running = list(storage.storage(device.path))
        memascend.close(model)
        kept = list(storage.storage(device.path))
        assert memascend.can_resume(device.path)
    for found, text in ((running, "a run is using it"), (kept, "holds the store of an earlier run")):
        assert not findings.has_problem(found)
        assert [line.level for line in found if text in line.text] == ["note"]
    assert f"memascend inspect {device.path}" in kept[0].remedy


@pytest.mark.parametrize(("percent", "celsius", "level"), [(3, 41, "ok"), (85, 41, "note"), (3, 75, "note")])
def test_wear_is_read(percent, celsius, level, tmp_path, monkeypatch):
    told = {"nvme_smart_health_information_log": {"percentage_used": percent}, "temperature": {"current": celsius}}
    program = tmp_path / "smartctl"
    # It tells of faults of the drive by its exit code, too.
    source = f"import sys; assert sys.argv[-1] == '/dev/sda'; print({json.dumps(told)!r}); sys.exit(4)"
    program.write_text(f"#!{sys.executable}\n{source}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(storage, "disk_of", lambda location: "sda")
    (found,) = storage._health(tmp_path)
    assert found.level == level
    assert f"{percent}%" in found.text and f"{celsius} degrees" in found.text


def test_a_page_is_as_wide_as_it_should_be():
    lines = [findings.note("a drive", "many words " * 30, "A remedy."), findings.ok("Python", "3.11")]
    page = findings.as_text(lines, 60).splitlines()
    assert len(page) > 5
    assert all(len(line) <= 60 for line in page)
    assert page[-1] == "0 problems, 1 note"


IMPORTED = """
import sys
from memascend.doctor import check
check()
print(sorted({"transformers", "accelerate"} & sys.modules.keys()))
"""


def test_it_needs_no_model_library():
    """A machine on which nothing but torch is installed is one that asks."""
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    command = [sys.executable, "-P", "-c", IMPORTED]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    assert run.stdout.strip() == "[]"
