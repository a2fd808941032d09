"""Records: conversations, prompts with completions, columns; the parts trained on, and how they are packed."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requirements
import tiny_models
import torch
from commands import in_memory, words_of
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from memascend.cli import main
from memascend.cli.data import ByteTokenizer, Documents, TokenBlocks, load_tokenizer, split
from memascend.cli.data import blocks as blocks_module
from memascend.cli.data.show import shown as shown_data
from memascend.common.choices import parse_held_out
from memascend.errors import DataError

#: The turns of ChatML; BEGIN and END are around the assistant's words.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "BEGIN{{ m['content'] }}<|im_end|>\nEND{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = CHATML.replace("BEGIN", "").replace("END", "")
MARKED = CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
#: As templates do that leave the thinking of earlier turns out.
FORGETFUL = PLAIN.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else '' }}")
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2!"},
]


def write_tokenizer(folder: Path, template: str | None, *, bos: bool = False) -> None:
    """Write a tokenizer of bytes, with two special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<|im_start|>", "<|im_end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(blocks_module, "PADDED_TO", 1)  # so that compared sequences have no padding
    for name in ("scratch", "tokenizer"):
        (tmp_path / name).mkdir()
    return tmp_path


def lines(room: Path, *records: dict[str, Any]) -> Path:
    file = room / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def blocks_of(
    room: Path, data: Path, *, seq_len: int = 16, template: str | None = PLAIN, **options: Any
) -> TokenBlocks:
    write_tokenizer(room / "tokenizer", template, bos=options.pop("bos", False))
    documents = Documents([data], scratch=room / "scratch")
    try:
        tokenizer = load_tokenizer(room / "tokenizer", 258)
        return TokenBlocks(
            documents, tokenizer, scratch=room / "scratch", seq_len=seq_len, seed=0, vocab_size=258, **options
        )
    finally:
        documents.close()


def shown(room: Path, batch: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the text of each row, and the part trained on."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(room / "tokenizer")
    rows = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert torch.equal(ids[labels >= 0], labels[labels >= 0])
        assert set(labels[labels < 0].tolist()) <= {-100}
        rows.append((tokenizer.decode(ids), tokenizer.decode(labels[labels >= 0])))
    return rows


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by prefixes", "by the template's marks"])
def test_of_a_conversation_the_assistants_turns_are_trained_on(room: Path, template: str) -> None:
    blocks = blocks_of(room, lines(room, {"messages": TALK}), seq_len=200, template=template, packing=False)
    ((text, trained),) = shown(room, blocks.batch(0, 1))
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TALK)
    assert (text, trained) == (turns, "1.<|im_end|>\n2!<|im_end|>\n")
    blocks.close()
    blocks = blocks_of(
        room, lines(room, {"messages": TALK}), seq_len=200, template=template, packing=False, loss_on_all=True
    )
    assert shown(room, blocks.batch(0, 1)) == [(turns, turns)]
    blocks.close()


def test_of_a_prompt_in_turns_the_completions_turns_are_trained_on(room: Path) -> None:
    record = {"prompt": TALK[:3], "completion": TALK[3:]}
    for template in (PLAIN, MARKED):
        blocks = blocks_of(room, lines(room, record), seq_len=200, template=template, packing=False)
        assert shown(room, blocks.batch(0, 1))[0][1] == "2!<|im_end|>\n"
        blocks.close()


def test_a_template_that_does_not_tell_who_says_what_is_refused(room: Path) -> None:
    data = lines(room, {"messages": TALK})
    with pytest.raises(
        DataError, match=r"data\.jsonl, line 1: the chat template renders turn 2 otherwise alone.*--loss-on all"
    ):
        blocks_of(room, data, template=FORGETFUL)
    blocks_of(room, data, template=FORGETFUL, loss_on_all=True).close()
    with pytest.raises(DataError, match="the chat template cannot render it: no content"):
        blocks_of(room, data, template="{{ raise_exception('no content') }}")
    broken = lines(room, {"messages": [{"role": "user"}]})
    with pytest.raises(DataError, match=r"line 1 has turn 1 \('user'\), whose content is missing: write a text"):
        blocks_of(room, broken)


@pytest.mark.parametrize("bos", [False, True])
def test_of_a_prompt_the_completion_is_trained_on(room: Path, bos: bool) -> None:
    data = lines(room, {"prompt": "what?", "completion": " that"})
    blocks = blocks_of(room, data, packing=False, bos=bos)
    begin = "<|im_start|>" if bos else ""
    assert shown(room, blocks.batch(0, 1)) == [(f"{begin}what? that<|im_end|>", " that<|im_end|>")]
    blocks.close()
    blocks = blocks_of(room, data, packing=False, bos=bos, loss_on_all=True)
    assert shown(room, blocks.batch(0, 1))[0][1] == f"{begin}what? that<|im_end|>"
    blocks.close()


def test_packed_documents_keep_their_labels(room: Path) -> None:
    records = [{"prompt": f"p{number}" * 3, "completion": f"c{number}"} for number in range(10)]
    records.append({"text": "a text, all of it"})
    blocks = blocks_of(room, lines(room, *records), seq_len=8)
    rows = [
        shown(room, {name: value[None] for name, value in zip(("input_ids", "labels"), row, strict=True)})[0]
        for row in stored(blocks)
    ]
    whole = "".join(text for text, _ in rows)
    expected = {f"p{n}" * 3 + f"c{n}<|im_end|>" for n in range(10)} | {"a text, all of it<|im_end|>"}
    found = {part + "<|im_end|>" for part in whole.split("<|im_end|>")[:-1]}
    assert len(found & expected) >= 9
    trained = "".join(part for _, part in rows)
    assert "p" not in trained and "a text, all of it<|im_end|>" in trained and "c3<|im_end|>" in trained
    blocks.close()


def stored(blocks: TokenBlocks) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every sequence in stored order."""
    count = len(blocks)
    found = {}
    for position in range(count):
        batch = blocks.batch(position, 1)
        ids = batch["input_ids"][0]
        number = next(i for i in range(count) if torch.equal(blocks.row(i)["input_ids"], ids) and i not in found)
        found[number] = (ids, batch["labels"][0])
    return [found[number] for number in range(count)]


def test_sequences_without_a_token_to_train_on_are_left_out(room: Path) -> None:
    data = lines(room, {"prompt": "p" * 100, "completion": "c" * 20})
    blocks = blocks_of(room, data, seq_len=16)
    assert len(blocks) == 1, "the first six of seven are of the prompt alone"
    assert blocks.notes() == ["sequences left out, since they hold prompts alone and nothing to train on: 6"]
    assert shown(room, blocks.batch(0, 1)) == [("p" * 4 + "c" * 12, "c" * 12)]
    blocks.close()
    with pytest.raises(DataError, match="within --seq-len 16, no document has a token to train on"):
        blocks_of(room, data, seq_len=16, packing=False)


def test_without_packing_each_document_is_a_sequence(room: Path) -> None:
    records = [{"text": "x" * length} for length in (3, 9, 40, 15)]
    blocks = blocks_of(room, lines(room, *records), seq_len=16, packing=False)
    assert len(blocks) == 4 and blocks.tokens == 4 + 10 + 16 + 16
    assert blocks.notes() == ["documents longer than --seq-len 16, which were cut off there: 1"]
    batch = blocks.batch(0, 4)
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
    assert sorted((batch["labels"] >= 0).sum(1).tolist()) == [4, 10, 16, 16]
    alone = [blocks.batch(number, 1)["input_ids"].shape[1] for number in range(4)]
    assert sorted(alone) == [4, 10, 16, 16], "a batch is as long as its longest"
    blocks.close()


def test_few_lengths_of_batches_occur(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "PADDED_TO", 8)
    records = [{"text": "x" * length} for length in (3, 7, 8, 15, 17, 18, 19, 40)]
    blocks = blocks_of(room, lines(room, *records), seq_len=20, packing=False)
    for number in range(len(blocks)):
        row, batch = blocks.row(number), blocks.padded([blocks.row(number)])
        length = len(row["labels"])
        assert batch["labels"].shape == batch["input_ids"].shape
        assert batch["labels"].shape[1] in (8, 16, 20) and batch["labels"].shape[1] < length + 8
        assert torch.equal(batch["input_ids"][0, :length], row["input_ids"])
        assert batch["labels"][0, length:].eq(-100).all()
    blocks.close()


def test_records_of_every_kind_of_file_are_the_same(room: Path) -> None:
    datasets, pyarrow = requirements.package("data", "datasets"), requirements.package("data", "pyarrow")
    parquet = requirements.package("data", "pyarrow.parquet")
    records = [
        {"messages": TALK},
        {"messages": TALK[:2], "other": 3},
        {"prompt": "p", "completion": "c"},
        {"text": "text"},
    ]
    (room / "array.json").write_text(json.dumps(records))
    table = pyarrow.Table.from_pylist(
        [
            {name: record.get(name) for name in ("messages", "prompt", "completion", "text", "other")}
            for record in records
        ]
    )
    parquet.write_table(table, room / "rows.parquet", row_group_size=2)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(room / "saved", num_shards=2)
    (room / "tree").mkdir()
    (room / "saved").rename(room / "tree" / "saved")
    found = []
    for data in (
        lines(room, *records),
        room / "array.json",
        room / "rows.parquet",
        room / "tree" / "saved",
        room / "tree",
    ):
        blocks = blocks_of(room, data, packing=False, seq_len=200)
        found.append(blocks.batch(0, 4))
        blocks.close()
    for batch in found[1:]:
        assert torch.equal(batch["labels"], found[0]["labels"]) and torch.equal(
            batch["input_ids"], found[0]["input_ids"]
        )


def test_columns_that_cannot_be_trained_on(room: Path) -> None:
    datasets, pyarrow = requirements.package("data", "datasets"), requirements.package("data", "pyarrow")
    parquet = requirements.package("data", "pyarrow.parquet")
    datasets.disable_progress_bars()
    halves = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict({"train": halves, "test": halves}).save_to_disk(room / "both")
    scratch = room / "scratch"
    with pytest.raises(DataError, match=r"both holds the splits train, test: name one, as .*both/train"):
        Documents([room / "both"], scratch=scratch)
    tree = room / "tree"
    tree.mkdir()
    (room / "both").rename(tree / "both")
    parquet.write_table(pyarrow.table({"body": ["text"]}), tree / "rows.parquet")
    (tree / "a.txt").write_text("text")
    documents = Documents([tree], scratch=scratch)
    documents.close()
    assert len(documents) == 1
    assert documents.skipped.lines() == [
        f"skipped 1 file (rows without text in field 'text', see --text-field): {tree}/rows.parquet",
        f"skipped 1 file (datasets of several splits: name one of them): {tree}/both",
    ]
    with pytest.raises(DataError, match=r"rows\.parquet, row 1 has no text in field 'text'.*Its fields: 'body'"):
        Documents([tree / "rows.parquet"], scratch=scratch)
    (tree / "rows.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        Documents([tree / "rows.parquet"], scratch=scratch)


def test_a_text_comes_before_other_fields_and_is_told(room: Path) -> None:
    documents = Documents([lines(room, {"text": "text", "messages": TALK})], scratch=room / "scratch")
    assert "".join(documents.document(0).pieces) == "text"  # type: ignore[union-attr]
    documents.close()
    assert documents.notes == [f"{room}/data.jsonl has 'text' beside messages: the text is what is trained on"]


def test_what_is_held_out_is_not_trained_on(room: Path) -> None:
    data = lines(room, *({"text": f"document {number}"} for number in range(20)))
    write_tokenizer(room / "tokenizer", None)
    tokenizer = load_tokenizer(room / "tokenizer", 258)
    found = []
    for seed in (0, 0, 1):
        documents = Documents([data], scratch=room / "scratch")
        sides = []
        for number, part in enumerate(split(len(documents), 0.25)):
            scratch = room / f"side{number}"
            scratch.mkdir(exist_ok=True)
            blocks = TokenBlocks(
                documents, tokenizer, scratch=scratch, seq_len=16, seed=seed, vocab_size=258, packing=False, part=part
            )
            assert len(blocks) == (15 if number == 0 else 5)
            batch = blocks.padded([blocks.row(index) for index in range(len(blocks))])
            sides.append({text for text, _ in shown(room, batch)})
            blocks.close()
        documents.close()
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 20
        found.append(sides[1])
    assert found[0] == found[1] != found[2]


def test_what_to_hold_out(tmp_path: Path) -> None:
    assert parse_held_out("0.1") == 0.1
    assert parse_held_out("held/out.jsonl") == Path("held/out.jsonl")
    for text in ("1", "0", "-0.5", "nan"):
        with pytest.raises(ValueError, match="not a fraction between 0 and 1"):
            parse_held_out(text)
    assert split(2, 0.001) == (range(1), range(1, 2))
    with pytest.raises(DataError, match=r"of 1 documents, a fraction of 0\.1 leaves none"):
        split(1, 0.1)


def test_host_memory_does_not_grow_with_rows(room: Path) -> None:
    pyarrow, parquet = requirements.package("data", "pyarrow"), requirements.package("data", "pyarrow.parquet")
    peaks = []
    for count in (4_000, 40_000):
        rows = {
            "prompt": [f"prompt {n}" for n in range(count)],
            "completion": [f"completion {n}" for n in range(count)],
        }
        parquet.write_table(pyarrow.table(rows), room / "rows.parquet", row_group_size=1_000)
        del rows
        tracemalloc.start()
        documents = Documents([room / "rows.parquet"], scratch=room / "scratch")
        blocks = TokenBlocks(
            documents, ByteTokenizer(), scratch=room / "scratch", seq_len=64, seed=0, vocab_size=258, packing=False
        )
        blocks.batch(3, 4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        blocks.close()
        documents.close()
        (room / "scratch" / "copy-1").unlink()
    assert peaks[1] < 1.25 * peaks[0] + 200_000, peaks


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_on_conversations_is_that_in_memory_and_goes_on_to_the_same_bits(
    room: Path, capfd: pytest.CaptureFixture[str], packing: bool
) -> None:
    model_dir = tiny_models.llama_directory(room, hidden=64, layers=1)
    data = lines(
        room,
        *(
            {
                "messages": [
                    {"role": "user", "content": f"{n}?"},
                    {"role": "assistant", "content": f"{n}." * (1 + n % 5)},
                ]
            }
            for n in range(40)
        ),
    )
    words = words_of(model_dir, room / "none", room / "store", data=data, batch_size=2, steps=4)
    assert main.main(words) == main.BAD_INPUT
    assert "--data holds conversations, but the tokenizer in" in capfd.readouterr().err
    write_tokenizer(model_dir, MARKED)
    flags = [] if packing else ["--no-packing"]

    def run(out: str, *more: str, store: str = "store", **changed: Any) -> dict[str, torch.Tensor]:
        words = words_of(
            model_dir,
            room / out,
            room / store,
            **{"data": data, "batch_size": 2, "steps": 4, "lr": 1e-3, "schedule": "constant"} | changed,
        )
        assert main.main([*(in_memory(words) if store == "memory" else words), *flags, *more]) == 0, (
            capfd.readouterr().err
        )
        return load_file(room / out / "model.safetensors")

    whole = run("whole")
    same = [
        run("memory", store="memory"),
        (run("short", "--keep-store", steps=2), run("longer", "--resume", "--change"))[1],
    ]
    for weights in same:
        assert all(torch.equal(value, whole[name]) for name, value in weights.items())
    other = run("all", "--loss-on", "all", store="other")
    assert not all(torch.equal(value, whole[name]) for name, value in other.items())


def test_data_is_shown_with_what_is_trained_on(room: Path) -> None:
    turns = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}]
    blocks = blocks_of(room, lines(room, *[{"messages": turns}] * 2), packing=False, seq_len=128)
    tokenizer = load_tokenizer(room / "tokenizer", 258)
    found = list(shown_data(blocks, tokenizer, 5))
    heads = [line.split(":")[0] for line in found if line.startswith("sequence")]
    assert heads == ["sequence 1 of 2", "sequence 2 of 2"]
    seen, trained = (next(line for line in found if line.startswith(f"  {kind}")) for kind in ("seen", "trained"))
    assert "How many?" in seen and "<|im_start|>" in seen and "Two." not in seen
    assert trained.startswith("  trained | Two.") and "How many?" not in trained
    labels = blocks.row(0)["labels"]
    assert f"{int((labels[1:] >= 0).sum())} of them trained on" in found[0]
    blocks.close()
    long = blocks_of(room, lines(room, {"text": "x" * 1000}), packing=False, seq_len=2000)
    told = list(shown_data(long, tokenizer, 1))
    long.close()
    assert len(told) == 3, "the first token is predicted from nothing"
    assert len(told[2]) < 300 and " ... " in told[2]
    assert ByteTokenizer().shown([*b"ab", 256, 257]) == "ab<end><pad>"


def test_splits_of_a_data_set_are_streamed(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements.package("data", "datasets").disable_progress_bars()
    monkeypatch.chdir(room)
    for part, text in (("train", "to train on"), ("test", "to test on")):
        file = room / "org" / "talks" / f"{part}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": f"{text} {number}", "other": 1}) + "\n" for number in range(3)))
    for named, text in (("org/talks:test", "to test on"), ("org/talks:default:train", "to train on")):
        documents = Documents([named], scratch=room / "scratch")
        assert len(documents) == 3
        pieces = [list(documents.document(number).pieces) for number in range(3)]  # type: ignore[union-attr]
        assert pieces == [[f"{text} {number}"] for number in range(3)]
        assert documents.where(1) == f"{named}, row 2"
        documents.close()
    with pytest.raises(DataError, match=r"org/talks: no such file; as a data set of the hub it cannot be read"):
        Documents(["org/talks:nowhere"], scratch=room / "scratch")
    with pytest.raises(DataError, match=r"row 1 .*text"):
        Documents(["org/talks:test"], scratch=room / "scratch", text_field="content")
    for path in ("src/missing.jsonl", "/org/talks:test", "talks"):
        with pytest.raises(DataError, match="No such file"):
            Documents([path], scratch=room / "scratch")


def test_weights_say_how_often_documents_are_taken(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in "ab":
        (room / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(4))
        )
        paths.append(room / f"{name}.jsonl")

    def counted(*weights: float) -> Counter[str]:
        documents = Documents(paths, scratch=room / "scratch", weights=weights)
        found = Counter("".join(documents.document(number).pieces) for number in range(len(documents)))  # type: ignore[union-attr]
        documents.close()
        return found

    assert counted() == counted(2, 2) == Counter(f"{name}{number}" for name in "ab" for number in range(4))
    twice = counted(0.5, 1)
    assert {twice[f"a{number}"] for number in range(4)} == {1} and {twice[f"b{number}"] for number in range(4)} == {2}
    part = counted(2.5, 1)
    assert sorted(part[f"a{number}"] for number in range(4)) == [2, 2, 3, 3] and part == counted(5, 2)
    words = ["finetune", "model", "--data", *map(str, paths), "--out", str(room / "out"), "--in-memory", "--weights"]
    for more, said in ((["1"], "1 numbers for 2 of --data"), (["1", "2", "--eval", "0.1"], "give --eval files")):
        assert main.main([*words, *more]) == main.BAD_INPUT
        assert said in capfd.readouterr().err
