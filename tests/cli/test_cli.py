"""The command line: bad input, a whole small run, NaN, and Ctrl-C."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import forked
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, T5Config

from memascend.cli import main

BUDGET = "256MiB"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A small Llama over bytes, in a Hugging Face directory without a tokenizer."""
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


@pytest.fixture
def room(tmp_path, model_dir):
    """A directory with a copy of the model, some text and a store; the arguments that use them."""
    shutil.copytree(model_dir, tmp_path / "model")
    shutil.copy(model_dir.parent / "text.txt", tmp_path)
    (tmp_path / "store").mkdir()
    return tmp_path


def command(room, *more, **changed):
    """Return the arguments of a small run; `changed` replaces a flag's value, or drops it with None."""
    flags = {
        "data": room / "text.txt",
        "store": room / "store",
        "host_memory": BUDGET,
        "out": room / "out",
        "steps": 3,
        "seq_len": 32,
        "batch_size": 2,
        "lr": 1e-3,
    } | changed
    words = ["finetune", str(flags.pop("model_dir", room / "model"))]
    for name, value in flags.items():
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return [*words, *map(str, more)]


def listing(room):
    """Return every path under `room` with its contents."""
    return {str(p.relative_to(room)): p.read_bytes() if p.is_file() else None for p in room.rglob("*")}


def steps_of(metrics):
    return [record for record in map(json.loads, metrics.read_text().splitlines()) if record["record"] == "step"]


def truncate(room):
    file = room / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def garble(room):
    (room / "model" / "model.safetensors").write_bytes(b"\xff" * 4096)


def drop_tensor(room):
    file = room / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def rewrite_config(**fields):
    def rewrite(room):
        file = room / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return rewrite


def write(name, content):
    return lambda room: (room / name).write_text(content)


def remove(name):
    return lambda room: (room / name).unlink()


def save_config(config):
    return lambda room: config.save_pretrained(room / "model")


MEMORY = {"store": None, "host_memory": None}
NOTHING = dict  # prepares nothing
BAD_INPUT = {
    # fault -> (preparation, changed flags, further words, the text in the line)
    "model missing": (NOTHING, {"model_dir": "/nonexistent"}, (), "/nonexistent is not a directory"),
    "model is a file": (NOTHING, {"model_dir": __file__}, (), "is not a directory"),
    "no config": (remove("model/config.json"), {}, (), "no config.json"),
    "config not JSON": (write("model/config.json", "{"), {}, (), "cannot be read as JSON"),
    "config of another kind": (write("model/config.json", '{"a": 1}'), {}, (), "names no model_type"),
    "unknown model type": (rewrite_config(model_type="nonesuch"), {}, (), "nonesuch"),
    "encoder-decoder": (save_config(T5Config()), {}, (), "no causal language model"),
    "a masked language model": (save_config(BertConfig(architectures=["BertForMaskedLM"])), {}, (), "BertForMaskedLM"),
    "an encoder": (save_config(BertConfig()), {}, (), "sees the tokens"),
    "deep config": (write("model/config.json", "[" * 100_000), {}, (), "config.json is nested"),
    "deep index, in memory": (
        write("model/model.safetensors.index.json", '{"weight_map":' + "[" * 5000 + "]" * 5000 + "}"),
        MEMORY,
        ("--in-memory",),
        "index.json is nested",
    ),
    "deep generation config, in memory": (
        write("model/generation_config.json", "[" * 5000 + "]" * 5000),
        MEMORY,
        ("--in-memory",),
        "generation_config.json is nested",
    ),
    "an index of something else, in memory": (
        lambda room: (
            (room / "model/model.safetensors").rename(room / "model/other.safetensors"),
            (room / "model/model.safetensors.index.json").write_text('{"metadata": {}}'),
        ),
        MEMORY,
        ("--in-memory",),
        "model (other.safetensors) cannot be loaded",
    ),
    "deep data": (write("text.jsonl", "[" * 100_000), {"data": "{room}/text.jsonl"}, (), "is no array of objects"),
    "code beside it": (
        rewrite_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        {},
        (),
        "memascend runs none",
    ),
    "code beside its tokenizer": (
        write(
            "model/tokenizer_config.json", '{"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["mine.T", null]}}'
        ),
        {},
        (),
        "memascend runs none",
    ),
    "no safetensors": (remove("model/model.safetensors"), {}, (), "no *.safetensors"),
    "truncated safetensors": (truncate, {}, (), "model.safetensors"),
    "garbage safetensors": (garble, {}, (), "model.safetensors"),
    "a tensor missing": (drop_tensor, {}, (), "model.layers.1.mlp.up_proj.weight"),
    "a tensor of another shape": (rewrite_config(intermediate_size=64), {}, (), "proj.weight"),
    "weights of another model": (save_config(GPT2Config(n_layer=1)), {}, (), ""),
    "truncated, in memory": (truncate, MEMORY, ("--in-memory",), "model.safetensors"),
    "garbage, in memory": (garble, MEMORY, ("--in-memory",), "model.safetensors"),
    "a tensor missing, in memory": (drop_tensor, MEMORY, ("--in-memory",), "layers.1.mlp.up_proj.weight"),
    "another shape, in memory": (
        rewrite_config(intermediate_size=64),
        MEMORY,
        ("--in-memory",),
        "proj.weight",
    ),
    "unsupported dtype": (NOTHING, {"dtype": "float16"}, (), "float16"),
    "budget too small": (NOTHING, {"host_memory": "64KiB"}, (), "64"),
    "budget not a size": (NOTHING, {"host_memory": "lots"}, (), "lots"),
    "no budget": (NOTHING, {"host_memory": None}, (), "give --host-memory, or --in-memory"),
    "no store": (NOTHING, {"store": None}, (), "give --store, or --in-memory"),
    "store and in memory": (NOTHING, {}, ("--in-memory",), "--in-memory uses no store"),
    "store is a file": (write("file", ""), {"store": "{room}/file"}, (), "file"),
    "store without parent": (NOTHING, {"store": "{room}/no/such/store"}, (), "no/such/store"),
    "no data": (NOTHING, {"data": None}, (), "--data"),
    "data missing": (NOTHING, {"data": "/nonexistent.txt"}, (), "/nonexistent.txt: No such file"),
    "data without text": (write("text.txt", " \n"), {}, (), "no text in"),
    "data too short": (write("text.txt", "short"), {}, (), "6 tokens"),
    "out exists": (write("out", "precious"), {}, (), "already exists"),
    "out has no parent": (NOTHING, {"out": "{room}/no/out"}, (), "cannot write in"),
    "metrics exist": (write("m.jsonl", "precious"), {"metrics": "{room}/m.jsonl"}, (), "already exists"),
    "too long for the model": (NOTHING, {"seq_len": 129}, (), "128 positions"),
    "steps not a number": (NOTHING, {"steps": "many"}, (), "'many' is not"),
    "no steps": (NOTHING, {"steps": 0}, (), "'0' is not"),
    "negative rate": (NOTHING, {"lr": "-1"}, (), "'-1' is not"),
    "rate not finite": (NOTHING, {"lr": "nan"}, (), "'nan' is not"),
    "steps and epochs": (NOTHING, {"epochs": 2}, (), "not allowed with"),
    "unknown schedule": (NOTHING, {"schedule": "steep"}, (), "steep"),
    "unknown flag": (NOTHING, {}, ("--nonesuch",), "--nonesuch"),
}


@pytest.mark.core
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_a_line_and_leaves_nothing(room, capfd, what):
    prepare, changed, more, says = BAD_INPUT[what]
    prepare(room) if prepare is not NOTHING else None
    changed = {name: value.format(room=room) if isinstance(value, str) else value for name, value in changed.items()}
    before = listing(room)
    assert len(before) >= 4
    code = main.main(command(room, *more, **changed))
    out, err = capfd.readouterr()
    assert code == main.BAD_INPUT, err
    told = [line for line in err.splitlines() if line.startswith("memascend: error: ")]
    assert len(told) == 1, err
    assert says in told[0]
    assert "Traceback" not in err + out
    assert listing(room) == before


def test_without_a_command_there_is_one_line_too(capfd):
    assert main.main([]) == main.BAD_INPUT
    assert capfd.readouterr().err.startswith("memascend: error: ")


@pytest.mark.parametrize("words", [["--help"], ["finetune", "--help"], ["demo", "--help"], ["--version"]])
def test_help(words, capfd):
    assert main.main(words) == 0
    assert "memascend" in capfd.readouterr().out


def test_a_budget_that_follows_the_machine_gives_the_same_weights(room, capfd):
    assert main.main(command(room, dtype="float32", host_memory="auto")) == 0, capfd.readouterr().err
    told = capfd.readouterr().err
    assert " at least + " in told and "(auto); 3 steps" in told
    assert main.main(command(room, "--in-memory", out=room / "mem", dtype="float32", **MEMORY)) == 0
    ssd, memory = (steps_of(room / name / "metrics.jsonl") for name in ("out", "mem"))
    assert [step["loss"] for step in ssd] == [step["loss"] for step in memory]
    assert all(step["host_bytes_peak"] <= step["host_bytes_budget"] for step in ssd)
    assert main.main(command(room, out=room / "no", host_memory="automatic")) == main.BAD_INPUT
    assert "not a size" in capfd.readouterr().err


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_gives_the_very_weights_of_the_run_in_memory(room, capfd, dtype):
    (room / "model" / "chat_template.jinja").write_text("template")
    settings = {"grad_accum": 2, "warmup_steps": 1, "dtype": dtype, "schedule": "linear"}
    assert main.main(command(room, **settings)) == 0, capfd.readouterr().err
    assert main.main(command(room, "--in-memory", out=room / "mem", **MEMORY, **settings)) == 0

    ssd, memory = (steps_of(room / name / "metrics.jsonl") for name in ("out", "mem"))
    assert len(ssd) == 3
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [step[name] for step in ssd] == [step[name] for step in memory], name
    assert [step["lr"] for step in ssd] == pytest.approx([0, 1e-3, 5e-4])
    assert sum(step["ssd_bytes_read"] for step in ssd) > 0
    assert all(step["host_bytes_peak"] <= step["host_bytes_budget"] == 256 << 20 for step in ssd)

    start = AutoModelForCausalLM.from_pretrained(room / "model", dtype=getattr(torch, dtype)).state_dict()
    weights = [
        AutoModelForCausalLM.from_pretrained(room / name, dtype=getattr(torch, dtype)).state_dict()
        for name in ("out", "mem")
    ]
    assert weights[0].keys() == weights[1].keys() == start.keys()
    for name, tensor in weights[0].items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, weights[1][name]), name
    assert sum(not torch.equal(weights[0][name], start[name]) for name in start) > len(start) / 2

    assert (room / "out" / "chat_template.jinja").read_text() == "template"
    assert list((room / "store").iterdir()) == []
    assert sorted(p.name for p in room.iterdir()) == ["mem", "model", "out", "store", "text.txt"]


@pytest.mark.parametrize(
    "chosen",
    [
        {"optimizer": "adamw", "states": "bfloat16"},
        {"optimizer": "lion", "states": "8bit", "no_master": True},
        {"optimizer": "sgd", "lr": 0.1},
        {"gradients": "bfloat16", "dtype": "float32", "grad_accum": 2},
        {"batch_size": 4, "micro_batch_size": 2, "tile_tokens": 24},
    ],
    ids=lambda chosen: chosen.get("optimizer", "sliced" if "micro_batch_size" in chosen else "rounded"),
)
def test_other_states_and_gradients_give_the_weights_of_the_run_in_memory(room, capfd, chosen):
    flags = ["--no-master"] if chosen.pop("no_master", False) else []
    assert main.main(command(room, *flags, **chosen)) == 0, capfd.readouterr().err
    assert main.main(command(room, "--in-memory", *flags, out=room / "mem", **MEMORY, **chosen)) == 0
    ssd, memory = (AutoModelForCausalLM.from_pretrained(room / name).state_dict() for name in ("out", "mem"))
    start = AutoModelForCausalLM.from_pretrained(room / "model", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(ssd[name], memory[name]) for name in memory)
    assert sum(not torch.equal(ssd[name], start[name]) for name in start) > len(start) / 2


def test_rounded_gradients_are_planned_and_belong_to_the_run(room, capfd):
    chosen = {"gradients": "bfloat16", "dtype": "float32"}
    assert main.main(command(room, "--keep-store", **chosen)) == 0, capfd.readouterr().err
    assert main.main(command(room, "--resume", out=room / "again", dtype="float32")) == main.BAD_INPUT
    assert "--gradients is auto, but the run in the store has bfloat16" in capfd.readouterr().err
    assert main.main(command(room, "--resume", out=room / "again", **chosen)) == 0
    plan = ["plan", str(room / "model"), "--json", "--dtype", "float32", "--seq-len", "32"]
    capfd.readouterr()
    found = []
    for flags in ([], ["--gradients", "bfloat16"]):
        assert main.main([*plan, *flags]) == 0
        found.append(json.loads(capfd.readouterr().out)["ssd_space"]["gradients_bytes"])
    assert 0 < found[1] < 0.6 * found[0]  # in whole pages
    on_gpu = ["--gradients", "bfloat16", "--gpu", "8GiB", "--flops", "1e12", "--pcie", "1e9", "--dram", "1e9"]
    assert main.main([*plan, *on_gpu, "--ssd", "1e9"]) == main.BAD_INPUT
    assert "--gradients bfloat16 works only on the CPU" in capfd.readouterr().out


def test_skipped_files_are_told(room, capfd):
    (room / "data").mkdir()
    (room / "text.txt").rename(room / "data" / "text.txt")
    (room / "data" / "other.jsonl").write_text('{"body": "text"}')
    (room / "data" / "latin.txt").write_bytes(b"caf\xe9")
    assert main.main(command(room, "--in-memory", data=room / "data", steps=1, **MEMORY)) == 0
    told = capfd.readouterr().err
    assert told.count("memascend: note: skipped 1 file (") == 2
    assert "other.jsonl" in told and "latin.txt" in told


def test_metrics_tell_the_run(room):
    metrics = room / "metrics.jsonl"
    assert main.main(command(room, metrics=metrics, steps=None, epochs=2)) == 0
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["record"] for record in records] == ["start", *["step"] * (len(records) - 2), "end"]
    start, end = records[0], records[-1]
    assert start["settings"]["seq_len"] == 32
    assert start["machine"]["processors"] == os.cpu_count()
    assert start["parameters"] == end["parameters"] > 100_000
    assert end["steps"] == start["steps"] == -(-2 * start["blocks"] // 2) == len(records) - 2
    assert end["ssd_bytes_read"] >= sum(r["ssd_bytes_read"] for r in records[1:-1]) > 0
    assert not (room / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_loss_that_is_not_finite_stops_or_is_skipped(room, capfd, in_memory):
    more = ("--in-memory",) if in_memory else ()
    where = MEMORY if in_memory else {}
    blow_up = {"lr": 1e30, "schedule": "constant", "steps": 4, **where}  # finite at step 1, and then no more
    before = listing(room)
    assert main.main(command(room, *more, **blow_up)) == main.FAILED
    told = capfd.readouterr().err
    assert "error: step 2 of 4: the " in told
    assert ("holds the run after step 1: --resume goes on" in told) == (not in_memory)
    after = listing(room)
    records = after.pop(".out.metrics.jsonl", None)
    assert (records is not None) == (not in_memory)
    assert {name: after[name] for name in after if not name.startswith("store/")} == before
    more = more or ("--resume",)
    assert main.main(command(room, *more, on_nan="skip", **blow_up)) == 0
    assert "4 of 4 steps, 3 of them skipped" in capfd.readouterr().out
    taken = steps_of(room / "out" / "metrics.jsonl")
    assert [step["step"] for step in taken] == [1, 2, 3, 4]
    assert [step["skipped"] for step in taken] == [False, True, True, True]
    assert not (room / ".out.metrics.jsonl").exists()


def test_a_run_that_skipped_every_step_is_a_failure(room, capfd):
    file = room / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    before = listing(room)
    assert main.main(command(room, on_nan="skip")) == main.FAILED
    assert "all 3 steps were skipped" in capfd.readouterr().err
    assert listing(room) == before


def start_process(room, **changed):
    """Return a long run of the command in its own process."""
    words = command(room, **{"metrics": room / "metrics.jsonl", "steps": 100_000} | changed)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked.Program(["-P", "-m", "memascend", *words], cwd=room, **pipes)


def wait_for_records(room, process, count, name="metrics.jsonl"):
    """Wait until the metrics file, whose path in `room` may be a pattern, has `count` lines; return it."""
    deadline = time.monotonic() + 120
    while not (found := [file for file in room.glob(name) if file.read_bytes().count(b"\n") >= count]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.05)
    return found[0]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.soak),
    ],
)
def test_one_signal_finishes_the_step_and_keeps_the_model(room, number, code):
    process = start_process(room)
    try:
        wait_for_records(room, process, 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    done = steps_of(room / "metrics.jsonl")[-1]["step"]
    assert f"holds the model after step {done}" in err
    assert "Traceback" not in err
    assert f"{done} of 100000 steps" in out
    AutoModelForCausalLM.from_pretrained(room / "out")
    assert f"holds the run after step {done}: --resume goes on" in err
    assert (room / "store" / "memascend.json").exists()
    assert sorted(p.name for p in room.iterdir()) == ["metrics.jsonl", "model", "out", "store", "text.txt"]


#: Makes its standard input the terminal that the process belongs to, then runs the command.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-P", "-m", "memascend", *sys.argv[1:]])
"""


def test_a_run_whose_terminal_is_closed_keeps_the_model_too(room):
    words = command(room, metrics=room / "metrics.jsonl", steps=100_000)
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *words],
        cwd=room,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    try:
        os.close(terminal)
        deadline = time.monotonic() + 120
        while not (room / "metrics.jsonl").exists() or (room / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline and process.poll() is None, "the run did not start"
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 1 << 16)
        os.close(ours)
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
    finally:
        process.kill()
        process.wait()
    AutoModelForCausalLM.from_pretrained(room / "out")
    assert json.loads((room / "metrics.jsonl").read_text().splitlines()[-1])["record"] == "end"


def test_a_second_signal_abandons_the_run(room):
    process = start_process(room, grad_accum=20_000)  # a step that takes minutes
    try:
        wait_for_records(room, process, 1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first Ctrl-C must let the step finish"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "what was begun is abandoned" in err
    assert "Traceback" not in err
    assert list((room / "store").iterdir()) == []
    assert sorted(p.name for p in room.iterdir()) == ["metrics.jsonl", "model", "store", "text.txt"]


@pytest.mark.parametrize("where", ["in --out", pytest.param("--metrics", marks=pytest.mark.soak)])
def test_a_killed_run_that_goes_on_has_the_metrics_of_every_step_once(room, where, capfd):
    chosen = {"steps": 60, "metrics": room / "metrics.jsonl" if where == "--metrics" else None}
    process = start_process(room, **chosen)
    try:
        name = "metrics.jsonl" if where == "--metrics" else ".out.partial-*/kept/metrics.jsonl"
        metrics = wait_for_records(room, process, 9, name)
    finally:
        process.kill()
        process.communicate()
    done = len(steps_of_whole_lines(metrics))
    assert 8 <= done < 60, "it was killed in mid-run"
    with open(metrics, "a") as file:  # a step that was recorded but is not durable, and one half recorded
        file.write(json.dumps({"record": "step", "step": done + 1, "loss": 0.0}) + '\n{"record": "st')
    assert main.main(command(room, "--resume", **chosen)) == 0, capfd.readouterr().err
    records = [json.loads(line) for line in (chosen["metrics"] or room / "out/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["record"] == "step"] == list(range(1, 61))
    assert [record["record"] for record in records if record["record"] != "step"] == ["start", "resume", "end"]
    assert all(record["loss"] > 0 for record in records if record["record"] == "step")
    assert "store" in listing(room) and not [name for name in listing(room) if name.startswith(".")]


def test_a_killed_run_that_goes_on_in_another_folder_has_its_metrics_and_leaves_none(room):
    (room / "elsewhere").mkdir()
    process = start_process(room, steps=60, metrics=None)
    try:
        wait_for_records(room, process, 5, ".out.partial-*/kept/metrics.jsonl")
    finally:
        process.kill()
        process.communicate()
    assert main.main(command(room, "--resume", steps=60, out=room / "elsewhere" / "out")) == 0
    steps = steps_of(room / "elsewhere" / "out" / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 61))
    assert not [name for name in listing(room) if name.startswith(".")]


def test_what_killed_runs_leave_goes_with_the_next_run_in_the_folder(room, capfd):
    process = start_process(room, metrics=None)
    living = start_process(room, metrics=None, out=room / "other", store=room / "store2")
    try:
        done = wait_for_records(room, process, 4, ".out.partial-*/kept/metrics.jsonl").read_text()
        wait_for_records(room, living, 2, ".other.partial-*/kept/metrics.jsonl")
        process.kill()
        process.communicate()
        # Any run clears the folder; the metrics of one that can be resumed stay.
        assert main.main(command(room, "--in-memory", out=room / "third", **MEMORY)) == 0, capfd.readouterr().err
        hidden = sorted(path.name for path in room.glob(".*"))
        assert [name.partition(".partial-")[0] for name in hidden] == [".other", ".out.metrics.jsonl"]
        assert (room / ".out.metrics.jsonl").read_text().startswith(done)
        assert living.poll() is None
    finally:
        process.kill()
        living.kill()
        process.communicate()
        living.communicate()
    assert main.main(command(room, "--in-memory", out=room / "fourth", **MEMORY)) == 0
    assert sorted(path.name for path in room.glob(".*")) == [".other.metrics.jsonl", ".out.metrics.jsonl"]


def steps_of_whole_lines(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and '"step"' in line[:20]]


def test_an_interrupted_run_that_goes_on_elsewhere_has_its_metrics_too(room):
    process = start_process(room, steps=60, metrics=None)
    try:
        wait_for_records(room, process, 5, ".out.partial-*/kept/metrics.jsonl")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    done = steps_of(room / "out" / "metrics.jsonl")[-1]["step"]
    assert main.main(command(room, "--resume", steps=60, out=room / "again")) == 0
    assert [step["step"] for step in steps_of(room / "again" / "metrics.jsonl")] == list(range(1, 61)) and done < 60
