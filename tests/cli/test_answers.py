"""`memascend generate` and `memascend chat`: the answers that transformers gives, streamed within a budget."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf_models import MODELS, write_adapters, write_model

import memascend
from memascend.cli.answers import room
from memascend.cli.answers.generating import Sampling
from memascend.cli.answers.room import DividedBudget, cache_bytes, divide, speed_text
from memascend.cli.answers.sources import Opening, opened, source_of
from memascend.cli.answers.texts import read_prompts
from memascend.cli.main import BAD_INPUT, main
from memascend.errors import BudgetError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXTS = ["The drive writes", "2 files: 12345 rows, don't we?", "see", "what's the step?", "rows"]
NEW = 8


#: Of 13 MiB in float32, most of them in layers.
LARGE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 12}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    kind, options, tokens = MODELS["qwen2"]
    monkeypatch.setitem(MODELS, "qwen2", (kind, options | getattr(request, "param", {}), tokens))
    made, tokenizer = write_model(tmp_path / "model", "qwen2")
    (tmp_path / "prompts.txt").write_text("\n\n".join(TEXTS) + "\n")
    return made, tokenizer


def expected(model: Any, ids: Sequence[int], ends: int) -> list[int]:
    """Return the answers of the model by itself, one prompt at a time."""
    found = model.generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=ends, pad_token_id=ends
    )[0, len(ids) :].tolist()
    return found[: found.index(ends)] if ends in found else found


def generate(tmp_path: Path, *words: object) -> list[dict[str, Any]]:
    out = tmp_path / "answers.jsonl"
    out.unlink(missing_ok=True)
    flags = ["--prompts", tmp_path / "prompts.txt", "--out", out, "--max-new-tokens", NEW, "--temperature", 0]
    assert main(["generate", *map(str, [*words, *flags, "--store", tmp_path])]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("model", [LARGE], indirect=True)
@pytest.mark.parametrize("memory", ["64MiB", "14MiB"])
@pytest.mark.parametrize("sequences", [1, 2, None])
def test_answers_are_those_of_transformers(
    model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], memory: str, sequences: int | None
) -> None:
    made, tokenizer = model
    batch = [] if sequences is None else ["--batch-size", sequences]
    found = generate(tmp_path, tmp_path / "model", "--host-memory", memory, "--raw", *batch)
    assert [line["prompt"] for line in found] == TEXTS
    for line in found:
        answer = expected(made, tokenizer(line["prompt"])["input_ids"], tokenizer.eos_token_id)
        assert line["answer"] == tokenizer.decode(answer, skip_special_tokens=True), line
        assert line["tokens"] == len(answer)
    told = capfd.readouterr().err
    assert ("larger than the budget" in told) == (memory != "64MiB"), told
    assert {path.name for path in tmp_path.iterdir()} == {"model", "prompts.txt", "answers.jsonl"}


def test_a_text_is_what_a_user_says_where_there_is_a_template(model: Any, tmp_path: Path) -> None:
    made, tokenizer = model
    found = generate(tmp_path, tmp_path / "model", "--host-memory", "64MiB")
    ids = tokenizer.apply_chat_template(found[1]["messages"], add_generation_prompt=True, return_dict=True)
    answer = expected(made, ids["input_ids"], tokenizer.eos_token_id)
    assert found[1]["messages"] == [{"role": "user", "content": TEXTS[1]}]
    assert found[1]["answer"] == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_store_answers_and_stays_as_it_is(model: Any, tmp_path: Path) -> None:
    made, tokenizer = model
    store = memascend.from_pretrained(
        tmp_path / "model", store=tmp_path / "s", host_memory="64MiB", dtype="float32", keep_store=True
    )
    with torch.no_grad():
        for weight in (store.lm_head.weight, made.lm_head.weight):
            weight.mul_(-1.0)
    memascend.close(store)
    before = memascend.resume(tmp_path / "s", host_memory="64MiB", keep_store=True)
    weights = dict(memascend.parameters_of(before.model))
    memascend.close(before.model)
    for _ in range(2):
        found = generate(tmp_path, tmp_path / "s", "--host-memory", "64MiB", "--raw")
        answer = expected(made, tokenizer(TEXTS[0])["input_ids"], tokenizer.eos_token_id)
        assert found[0]["answer"] == tokenizer.decode(answer, skip_special_tokens=True)
    after = memascend.resume(tmp_path / "s", host_memory="64MiB", keep_store=True)
    assert all(torch.equal(weights[name], value) for name, value in memascend.parameters_of(after.model))
    memascend.close(after.model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
def test_adapters_answer(model: Any, tmp_path: Path) -> None:
    made, tokenizer = model
    adapted = write_adapters(made, tmp_path / "model", tmp_path / "adapters")
    found = generate(tmp_path, tmp_path / "adapters", "--host-memory", "64MiB", "--raw")
    answer = expected(adapted.eval(), tokenizer(TEXTS[0])["input_ids"], tokenizer.eos_token_id)
    assert found[0]["answer"] == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_conversation(
    model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tokenizer = model
    monkeypatch.setattr("sys.stdin", io.StringIO("see\nrows\n/new\nrows\n\nnot read\n"))
    words = ["--host-memory", "64MiB", "--temperature", "0", "--max-new-tokens", str(NEW), "--context", "200"]
    assert main(["chat", str(tmp_path / "model"), *words, "--store", str(tmp_path)]) == 0
    messages: list[dict[str, str]] = []
    answers = []
    for line in ("see", "rows", None, "rows"):
        if line is None:
            messages = []
            continue
        messages.append({"role": "user", "content": line})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = expected(made, ids, tokenizer.eos_token_id)
        answers.append(tokenizer.decode(answer, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    assert capfd.readouterr().out == "".join(f"{answer}\n" for answer in answers)
    assert answers[1] != answers[2]


# ---- room, prompts ------------------------------------------------------------------------------------------


def test_keys_and_values_are_counted(model: Any) -> None:
    made, tokenizer = model
    ids = torch.tensor([tokenizer(TEXTS[1])["input_ids"]])
    with torch.no_grad():
        cache = made(ids, use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == ids.shape[1] * cache_bytes(made.config, 4)


def test_a_budget_is_divided() -> None:
    divided = divide(1 << 20, [10] * 100, 10, 1 << 10, None)
    assert (divided.sequences, divided.cache, divided.host_memory) == (12, 12 * 20 << 10, (1 << 20) - (12 * 20 << 10))
    assert divide(1 << 20, [10], 10, 1 << 10, None).sequences == 1
    assert divide(1 << 30, [4000] * 9, 10, 1, None).sequences == 2  # tokens of a pass
    assert divide(1 << 20, [10] * 100, 10, 1 << 10, 20).sequences == 20
    with pytest.raises(BudgetError, match="give less of --batch-size or --max-new-tokens"):
        divide(1 << 20, [10] * 100, 10, 1 << 10, 30)


def read_bytes(model: Any) -> int:
    counters = memascend.stats(model)
    return counters["file_bytes_read"] + counters["ssd_bytes_read"]


@pytest.mark.parametrize("model", [LARGE, LARGE | {"vocab_size": 40000}], indirect=True)
def test_what_a_pass_reads_is_said_before(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_rate", lambda weights: 1e6)
    made, _ = model
    source = source_of([tmp_path / "model"])
    divided = DividedBudget((14 if made.config.vocab_size == 400 else 30) << 20, 2, 0)
    with opened(source, divided, Opening(tmp_path)) as streamed:
        told = speed_text(streamed, source.weights, divided, 1000)
        generation = Sampling(NEW, 0.0)
        generation.answers(streamed, [[1, 2, 3]] * 2)
        before = read_bytes(streamed)
        generation.answers(streamed, [[1, 2, 3]] * 2)
        read = (read_bytes(streamed) - before) / NEW
    said = re.search(
        r"reads ([\d.]+) MB of [\d.]+ MB, at least ([\d.]+) s for each token at 1.00 MB/s \((.*) for all\)", told
    )
    assert said is not None, told
    assert float(said[1]) * 1e6 == pytest.approx(read, rel=0.1)
    assert said[2] == f"{float(said[1]):.2g}" and said[3] == f"{float(said[1]) * 1000 / 3600:.2g} h"
    assert "and that gives each of 2 sequences one" in told
    enough = re.search(r"--host-memory ([\d.]+)MiB keeps", told)
    assert enough is not None, told
    with opened(source, DividedBudget(int(float(enough[1]) * (1 << 20)), 1, 0), Opening(tmp_path)) as kept:
        assert "stays in memory" in speed_text(kept, source.weights, DividedBudget(0, 1, 0))


def test_a_drive_is_timed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(33 << 20))
    (tmp_path / "config.json").write_bytes(b"{}")
    rate = room._rate(tmp_path)
    assert rate is None or 1e6 < rate < 1e12  # None on a filesystem without direct I/O


def test_prompts_of_records(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file.write_text("\n".join(map(json.dumps, [{"prompt": "a"}, {"messages": messages}, "b"])))
    assert read_prompts(file, as_messages=False) == ["a", messages, "b"]
    assert read_prompts(file, as_messages=True)[2] == [{"role": "user", "content": "b"}]
    for line in ("{", "{}", '{"messages": []}', "3"):
        file.write_text('"a"\n' + line)
        with pytest.raises(DataError, match=r"line 2: neither"):
            read_prompts(file, as_messages=False)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.txt", as_messages=False)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-new-tokens", "255"], "give --max-new-tokens 2"),
        (["--prompts", "no.txt"], "--prompts no.txt cannot be read"),
        (["--out", "."], "--out . exists"),
        (["--out", "no/such/folder"], "--out no/such/folder cannot be written"),
        (["--host-memory", "1MiB"], "more are for keys and values: give --host-memory"),
        (["--tokenizer", "."], "holds no tokenizer"),
    ],
)
def test_what_cannot_be_answered_is_said_first(
    model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    base = ["generate", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--store", str(tmp_path)]
    base += ["--out", str(tmp_path / "answers.jsonl")]
    seen = sorted(tmp_path.rglob("*"))
    assert main([*base, "--host-memory", "64MiB", "--max-new-tokens", "8", *words]) == BAD_INPUT
    told = capfd.readouterr().err
    assert problem in told, told
    assert len(re.findall("error:", told)) == 1
    assert sorted(tmp_path.rglob("*")) == seen
