"""`memascend plan`: its tables, and bad input."""

import json

import pytest
import torch
from tiny_models import smallest_budget
from traffic import SMALL, saved
from transformers import LlamaForCausalLM, T5Config

from memascend.cli import main
from memascend.forecast.forecast import forecast


def test_the_tables_show_every_part(tmp_path, capfd):
    saved(SMALL, tmp_path)
    words = ["plan", str(tmp_path), "--host-memory", "256MiB", "--seq-len", "64", "--grad-accum", "2", "--details"]
    assert main.main([*words, "--compare", "zero-infinity"]) == 0
    out = capfd.readouterr().out
    for title in ("LlamaForCausalLM, ", "Host memory", "SSD space", "SSD traffic", "On top", "Beside it"):
        assert title in out
    assert main.main(words) == 0
    assert "ZeRO-Infinity" not in capfd.readouterr().out
    for compared in (words, [*words, "--compare", "zero-infinity"]):
        assert main.main([*compared, "--json"]) == 0
        assert ("zero_infinity" in json.loads(capfd.readouterr().out)) == ("--compare" in compared)
    assert "256.0 MiB" in out
    assert "2 x 1 sequences of 64 tokens" in out
    assert all(len(line) <= 132 for line in out.partition("\n\n")[2].splitlines())


def prepare(room, what):
    """Write a model directory with something wrong; return the arguments and the expected message."""
    config = room / "config.json"
    if what == "missing":
        return [room / "nowhere"], "nowhere does not exist"
    if what == "no config":
        return [room], "has no config.json"
    if what == "not JSON":
        config.write_text("{")
        return [room], "cannot be read as JSON"
    if what == "no model_type":
        config.write_text('{"hidden_size": 64}')
        return [config], "names no model_type"
    if what == "unknown":
        config.write_text('{"model_type": "nonesuch"}')
        return [config], "nonesuch"
    if what == "encoder-decoder":
        saved(T5Config(), room)
        return [room], "no causal language model"
    saved(SMALL, room)
    if what == "too long":
        return [room, "--seq-len", "257"], "257 is more than the model's 256 positions"
    assert what == "too small"
    words = [room, "--seq-len", "64", "--host-memory", "1MiB", "--dtype", "bfloat16"]
    return words, "a host memory budget of 1.0 MiB is too small"


WRONG = ["missing", "no config", "not JSON", "no model_type", "unknown", "encoder-decoder", "too long", "too small"]


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_gets_one_message(tmp_path, capfd, what):
    words, says = prepare(tmp_path, what)
    assert main.main(["plan", *map(str, words)]) == main.BAD_INPUT
    out, err = capfd.readouterr()
    assert out == ""
    assert [says in line for line in err.splitlines() if line.startswith("memascend: error: ")] == [True], err
    assert "Traceback" not in err


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_json_object(tmp_path, capfd, what):
    words, says = prepare(tmp_path, what)
    assert main.main(["plan", *map(str, words), "--json"]) == main.BAD_INPUT
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert says in told["error"]
    assert "memascend: error" not in err
    if what == "too small":
        assert told["smallest_bytes"] == smallest_budget(LlamaForCausalLM(SMALL).to(torch.bfloat16))
        assert forecast(tmp_path, seq_len=64, batch_size=1, budget=told["smallest_bytes"])
    else:
        assert list(told) == ["error"]


@pytest.mark.parametrize("words", [["--seq-len", "1"], ["--dtype", "float16"], ["--host-memory", "much"]])
def test_usage_errors_name_the_word(tmp_path, capfd, words):
    assert main.main(["plan", str(tmp_path), *words]) == main.BAD_INPUT
    assert words[1] in capfd.readouterr().err
