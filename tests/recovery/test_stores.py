"""The contents of a store, inspected, verified and exported without training; and stores that find no room."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import forked
import pytest
import tiny_models
import torch
from commands import words_of
from durable_run import LEAST, Run, build, go_on, same
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import memascend
from memascend._memascend import format_device
from memascend.cli import main
from memascend.cli.tables import savings_text
from memascend.forecast.of_store import savings_of_store
from memascend.recovery import running_store

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor], dict[str, Any]]]:
    """A store after three steps with a checkpoint after the second, its weights, and its optimizer's state_dict."""
    model = memascend.offload(build("llama"), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    run = Run(model, "llama").go(2)
    memascend.save_checkpoint(model, "second")
    run.go(3, 2)
    weights, states = dict(memascend.parameters_of(model)), run.optimizer.state_dict()
    memascend.close(model)
    yield tmp_path / "s", weights, states


def told(capfd: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main.main([str(word) for word in words]) == code, capfd.readouterr().err
    return capfd.readouterr().out


@pytest.mark.core
def test_a_store_is_inspected(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, weights, _ = kept
    parameters = sum(weight.numel() for weight in weights.values())
    text = told(capfd, "inspect", store, "--tensors", "--tbw", 1)
    assert f"LlamaForCausalLM, {parameters / 1e6:,.1f}M parameters, AdamW" in text
    assert "step 3, generation" in text
    assert "checkpoint second: step 2" in text
    assert "model.layers.2.mlp.up_proj.weight.master_low" in text
    assert "% of the drive's rated endurance" in text
    found = json.loads(told(capfd, "inspect", store, "--tbw", 1, "--json"))
    assert (found["steps"], found["parameters"], found["model"]) == (3, parameters, "LlamaForCausalLM")
    assert [(one["tag"], one["steps"]) for one in found["checkpoints"]] == [("second", 2)]
    assert sum(tensor["bytes"] for tensor in found["tensors"]) >= 12 * parameters
    kinds = found["step_bytes"]
    assert sum(kinds.values()) == sum(tensor["bytes"] for tensor in found["tensors"])
    # In whole pages.
    per_parameter = {"weights": 2, "master_low": 2, "exp_avg": 4, "exp_avg_sq": 4}
    assert kinds.keys() == {*per_parameter, "buffers"}
    for kind, nbytes in per_parameter.items():
        assert nbytes * parameters <= kinds[kind] <= 1.1 * nbytes * parameters, kind
    assert "a step writes" in text and f"exp_avg {kinds['exp_avg'] / 1e6:.2f} MB" in text
    (volume,) = found["volumes"]
    assert volume["path"] == str(store)
    # The weights once, and three times 12 bytes of each parameter.
    assert volume["life_bytes_written"] >= (2 + 3 * 12) * parameters
    assert volume["endurance_used"] == pytest.approx(volume["life_bytes_written"] / 1e12)
    # The life goes on with the run.
    go_on(store, "llama", steps=4, keep_store=True)
    again = json.loads(told(capfd, "inspect", store, "--json"))
    assert again["volumes"][0]["life_bytes_written"] >= volume["life_bytes_written"] + 12 * parameters


def test_what_would_write_less_than_the_run_in_a_store(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, _, _ = kept
    text = told(capfd, "inspect", store, "--savings")
    assert "--states bfloat16 would write" in text
    found = json.loads(told(capfd, "inspect", store, "--savings", "--json"))
    assert (found["recipe"]["optimizer"], found["recipe"]["states"]) == ("AdamW", "float32")
    saved = {saving["change"]: saving["saved"] for saving in found["savings"]}
    # Four bytes a parameter of 12 and of gradients, which go to the SSD at the least host memory.
    assert 4 / 14 <= saved["--states bfloat16"] <= 4 / 12
    assert savings_of_store(found["recipe"] | {"optimizer": "Adagrad"}) is None
    assert savings_of_store(found["recipe"] | {"config": {"model_type": "t5"}}) is None
    assert "not known" in savings_text(savings_of_store(None))


@pytest.mark.core
def test_a_store_is_verified(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, _, _ = kept
    assert "everything is as it was written" in told(capfd, "verify", store)
    found = json.loads(told(capfd, "inspect", store, "--json"))
    assert found["generation"] > 0
    file = store / "memascend.volume"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    assert main.main(["verify", str(store)]) == main.FAILED
    out, err = capfd.readouterr()
    assert "damaged: model.embed_tokens.weight, bytes 0 to 1048576: in" in out
    assert str(file) in out
    assert "not as they were written" in err


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_damaged_manifest_is_told_and_mended(kept: Any, capfd: pytest.CaptureFixture[str], is_whole: bool) -> None:
    store, _, _ = kept
    manifest = store / "memascend.json"
    steps = json.loads(told(capfd, "inspect", store, "--json"))["steps"]
    content = bytearray(manifest.read_bytes())
    content[200] ^= 1
    manifest.write_bytes(content)
    report = json.loads(told(capfd, "inspect", store, "--json"))
    assert report["steps"] <= steps and [checkpoint["tag"] for checkpoint in report["checkpoints"]] == ["second"]
    assert any(str(store) in notice and "the one before it was taken" in notice for notice in report["notices"])
    assert manifest.read_bytes() == content, "looking changes nothing"
    if not is_whole:
        volume = store / "memascend.volume"
        volume.write_bytes(bytes(volume.stat().st_size))
    assert main.main(["verify", str(store)]) == main.FAILED
    out, err = capfd.readouterr()
    end = "it is written anew" if is_whole else "it stays as it is, since other damage was found"
    assert f"damaged: the manifest {manifest}: the one before it was taken, which has step {report['steps']}" in out
    assert f"the last commit is lost; {end}" in out and "not as they were written" in err
    if is_whole:
        assert "everything is as it was written" in told(capfd, "verify", store)
        assert json.loads(told(capfd, "inspect", store, "--json"))["steps"] == report["steps"]
    else:
        assert manifest.read_bytes() == content


def test_checkpoints_on_the_command_line(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, _, _ = kept
    reference = Run(build("llama"), "llama").go(4).state()
    assert told(capfd, "checkpoints", store).startswith("checkpoint second: step 2")
    assert main.main(["checkpoints", str(store), "--restore", "third"]) == main.BAD_INPUT
    assert "third" in capfd.readouterr().err
    told(capfd, "checkpoints", store, "--restore", "second")
    assert json.loads(told(capfd, "inspect", store, "--json"))["steps"] == 2
    assert told(capfd, "checkpoints", store, "--delete", "second") == "no checkpoints\n"
    durable, _, state = go_on(store, "llama")
    assert durable == 2
    same(state, reference)


@pytest.mark.parametrize("volumes", [1, 2])
def test_a_run_that_is_going_on_is_inspected(tmp_path: Path, capfd: pytest.CaptureFixture[str], volumes: int) -> None:
    stores = [tmp_path / str(number) for number in range(volumes)]
    model = memascend.offload(build("llama"), store=stores, host_memory="64MiB", **LEAST)
    going_on = f"a run is going on (process {os.getpid()})"
    assert main.main(["inspect", str(stores[0])]) == main.BAD_INPUT
    assert f"{going_on}, and no step is durable yet" in capfd.readouterr().err
    run = Run(model, "llama").go(2)
    memascend.save_checkpoint(model, "second")
    run.go(3, 2)
    memascend.flush(model)
    text = told(capfd, "inspect", stores[-1], "--tensors")
    assert f"note: {going_on}: this is its last durable step" in text and "step 3, generation" in text
    found = json.loads(told(capfd, "inspect", stores[0], "--json", "--tbw", 1))
    for words in (["verify"], ["checkpoints", "--delete", "second"]):
        assert main.main([words[0], str(stores[0]), *words[1:]]) == main.BAD_INPUT
        assert f"{stores[0]}: {going_on}, which writes over" in capfd.readouterr().err
    memascend.offload_of(model).close(failed=True)
    idle = json.loads(told(capfd, "inspect", stores[0], "--json", "--tbw", 1))
    assert [notice for notice in found.pop("notices") if going_on not in notice] == idle.pop("notices")
    for report in (found, idle):
        for volume in report["volumes"]:
            del volume["free_bytes"], volume["reserved_bytes"]  # of the files, which the drive shares with others
    assert found == idle
    assert [one["tag"] for one in idle["checkpoints"]] == ["second"] and len(idle["volumes"]) == volumes


def test_a_manifest_that_is_being_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memascend.offload(build("llama"), store=tmp_path / "s", host_memory="64MiB", keep_store=True, **LEAST)
    Run(model, "llama").go(1)
    memascend.close(model)
    file = tmp_path / "s" / "memascend.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + b"\0" + whole[1001:])
    monkeypatch.setattr(running_store.time, "sleep", lambda _: file.write_bytes(whole))
    (report, _) = running_store.live_report([tmp_path / "s"], "1")
    assert report["generation"] == json.loads(whole.rstrip(b"\0").split(b"\n", 1)[1])["current"]["number"]
    file.write_bytes(whole[:1000] + b"\0" + whole[1001:])
    monkeypatch.setattr(running_store.time, "sleep", lambda _: None)
    with pytest.raises(memascend.StoreError, match="no step is durable yet"):
        running_store.live_report([tmp_path / "s"], "1")


def test_an_export_has_the_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_models.llama_directory(tmp_path, hidden=64)
    run = words_of(model, tmp_path / "out", tmp_path / "store", steps=1)
    assert main.main([*run, "--keep-store"]) == 0, capfd.readouterr().err
    capfd.readouterr()
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    (model / "chat_template.jinja").write_text("template")
    export = ["export", str(tmp_path / "store"), "--out"]
    assert main.main([*export, str(tmp_path / "first")]) == 0
    assert (tmp_path / "first" / "chat_template.jinja").read_text() == "template"
    assert "the tokenizer is missing" not in capfd.readouterr().err
    moved = model.rename(tmp_path / "moved")
    assert main.main([*export, str(tmp_path / "second")]) == 0
    assert f"note: the tokenizer is missing: {model}, which" in capfd.readouterr().err
    assert main.main([*export, str(tmp_path / "third"), "--tokenizer", str(moved)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "third" / name).read_bytes() == (moved / name).read_bytes()
    # Files written by the export itself stay.
    assert json.loads((tmp_path / "third" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    (model / "tokenizer_config.json").write_text("of another model")
    assert main.main([*export, str(tmp_path / "fourth")]) == 0
    assert "holds another model" in capfd.readouterr().err
    assert not (tmp_path / "fourth" / "tokenizer_config.json").exists()
    for more in (["--tokenizer", str(tmp_path)], ["--tokenizer", str(moved), "--format", "distributed"]):
        assert main.main([*export, str(tmp_path / "fifth"), *more]) == main.BAD_INPUT
        assert "--tokenizer" in capfd.readouterr().err and not (tmp_path / "fifth").exists()


def test_nothing_is_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect"], ["verify"], ["checkpoints"], ["export", "--out", str(tmp_path / "out")]):
        assert main.main([words[0], str(tmp_path / "no"), *words[1:]]) == main.BAD_INPUT
        assert str(tmp_path / "no") in capfd.readouterr().err


@pytest.mark.parametrize("layout", ["huggingface", "torch", "distributed"])
def test_a_store_is_exported(kept: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: str) -> None:
    store, weights, states = kept
    out = tmp_path / "exported"
    text = told(capfd, "export", store, "--out", out, "--format", layout)
    assert text == f"wrote {out}: the model after step 3\n"
    if layout != "distributed":
        model = AutoModelForCausalLM.from_pretrained(out)
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[name]), name
    if layout == "torch":
        saved = torch.load(out / "optimizer.pt", weights_only=True)
        assert saved["param_groups"] == states["param_groups"]
        for key, state in states["state"].items():
            same(saved["state"][key], state)
    if layout == "distributed":
        model = build("llama")
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        memascend.load_distributed(model, optimizer, out)
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[name]), name
    assert main.main(["export", str(store), "--out", str(out)]) == main.BAD_INPUT
    assert "already exists" in capfd.readouterr().err
    # The store is as it was.
    durable, _, state = go_on(store, "llama")
    assert durable == 3
    same(state, Run(build("llama"), "llama").go(4).state())


@pytest.mark.parametrize(
    ("ending", "steps"),
    [
        ("raise ValueError('mine')", 1),
        ("raise KeyboardInterrupt", 1),
        ("pass", 2),
        ("raise SystemExit(143)", 2),
        ("memascend.close(model)", None),
    ],
)
def test_a_store_stays_when_its_program_fails(tmp_path: Path, ending: str, steps: int | None) -> None:
    code = f"""
        import torch, memascend
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
        memascend.offload(model, store={str(tmp_path / "s")!r}, host_memory="256MiB", allocator="pageable")
        optimizer = memascend.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        {ending}
    """
    forked.run(["-P", "-c", textwrap.dedent(code)], timeout=120)
    assert memascend.can_resume(tmp_path / "s") == (steps is not None)
    if steps is not None:
        linears = [torch.nn.Linear(256, 256) for _ in range(3)]
        resumed = memascend.resume(tmp_path / "s", model=torch.nn.Sequential(*linears), **LEAST)
        assert resumed.steps == steps, "after an exception, the update of the second step is given up"
        memascend.close(resumed.model)


@pytest.mark.root
@pytest.mark.parametrize("sector", [512, 4096])
def test_a_raw_device_goes_on_beside_a_directory(tmp_path: Path, sector: int) -> None:
    expected = Run(build("llama"), "llama").go(5).state()
    with faults.loop_device(192 * MIB, sector=sector) as device:
        uuid = format_device(device.path)[0]
        places = [tmp_path / "directory", Path(f"UUID={uuid}")]
        model = memascend.offload(build("llama"), store=places, host_memory="64MiB", **LEAST)
        run = Run(model, "llama").go(3)
        memascend.flush(model)
        memascend.save_checkpoint(model, "three")
        run.go(4, 3)
        with pytest.raises(memascend.StoreError, match=r"in use|busy"):
            memascend.resume(places)
        memascend.offload_of(model).close(failed=True)
        device.rename()
        # Any of the volumes is enough, and the others are found.
        for place in places:
            assert memascend.can_resume(place)
        resumed = memascend.resume(places[1], **LEAST)
        assert resumed.steps == 3, "the fourth was not durable yet"
        memascend.delete_checkpoint(resumed.model, "three")
        same(Run(resumed.model, "llama", resumed.optimizer).go(5, 3).state(), expected)
        memascend.close(resumed.model)
        assert not memascend.can_resume(places[1])


# ---- no room --------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_without_room_for_two_slots_it_is_in_place(tmp_path: Path) -> None:
    model = build("llama")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with faults.mounted("ext4", 20 * parameters + 16 * MIB, tmp_path / "drive") as drive:
        options = {"store": drive.path / "s", "host_memory": "64MiB", **LEAST}
        memascend.offload(model, durability="step", **options)
        with pytest.raises(memascend.StoreError, match="not enough space") as caught:
            memascend.AdamW(model.parameters(), lr=1e-2)
        assert str(drive.path) in str(caught.value)
        memascend.close(model)
        model = build("llama")
        memascend.offload(model, **options)
        run = Run(model, "llama").go(2)
        assert any("no room for" in notice and "in place" in notice for notice in memascend.stats(model)["notices"])
        assert memascend.stats(model)["generation"] == 0
        expected = Run(build("llama"), "llama").go(2)
        assert run.losses == expected.losses
        same(dict(memascend.parameters_of(model)), dict(expected.model.named_parameters()))
        memascend.close(model)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_checkpoint_without_room_changes_nothing(tmp_path: Path, kind: str) -> None:
    expected = Run(build("llama"), "llama").go(5).state()
    with faults.mounted(kind, faults.LEAST_BYTES[kind] + 128 * MIB, tmp_path / "drive") as drive:
        store = drive.path / "s"
        model = memascend.offload(build("llama"), store=store, host_memory="64MiB", **LEAST)
        run = Run(model, "llama").go(2)
        ballast = drive.fill(leave=MIB)
        with pytest.raises(memascend.StoreError, match="not enough space"):
            memascend.save_checkpoint(model, "two")
        assert memascend.checkpoints(model) == []
        run.go(3, 2)
        with pytest.raises((OSError, memascend.CheckpointError), match=r"[Nn]o space left|not enough space"):
            memascend.save_distributed(model, run.optimizer, drive.path / "dcp")
        assert not (drive.path / "dcp").exists()
        ballast.unlink()
        memascend.save_checkpoint(model, "three")
        run.go(4, 3)
        memascend.flush(model)
        memascend.offload_of(model).close(failed=True)
        resumed = memascend.resume(store, tag="three", **LEAST)
        assert resumed.steps == 3
        run = Run(resumed.model, "llama", resumed.optimizer).go(5, 3)
        same(run.state(), expected)
        memascend.close(resumed.model)
