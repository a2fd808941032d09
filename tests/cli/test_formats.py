"""Data as it comes: encodings, formats by content, tables, and the ways to write a conversation."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import requirements
from test_records import MARKED, PLAIN, TALK, blocks_of, lines, shown, write_tokenizer

from memascend.cli.data import ByteTokenizer, Documents, load_tokenizer
from memascend.cli.data.records import Chat, Completion, Instruction, read_record
from memascend.cli.dataset import Reader
from memascend.cli.settings import Settings
from memascend.errors import DataError

RECORDS = [{"text": "one é 𝄞"}, {"text": 'two, "and"\nmore'}]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def texts(path: Path, scratch: Path, **options: Any) -> list[str]:
    documents = Documents([path], scratch=scratch, **options)
    try:
        return ["".join(documents.document(n).pieces) for n in range(len(documents))]  # type: ignore[union-attr]
    finally:
        documents.close()


def csv_of(separator: str) -> str:
    return f'text{separator}id\none é 𝄞{separator}1\n"two, ""and""\nmore"{separator}2\n'


@pytest.mark.parametrize(
    "name", ["a.JSONL", "a.ndjson", "a.JSON", "array.json", "array.jsonl", "a.txt", "a.csv", "a.TSV"]
)
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE])
def test_records_are_known_by_what_a_file_holds(tmp_path: Path, scratch: Path, name: str, mark: bytes) -> None:
    text = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS) + "\n"
    if name.startswith("array"):
        text = json.dumps(RECORDS, ensure_ascii=False, indent=1)
    if name[2:].lower() in ("csv", "tsv"):
        text = csv_of(";" if name == "a.csv" else "\t")
    encoding = {2: "utf-16-le", 4: "utf-32-le"}.get(len(mark), "utf-8")
    if mark == codecs.BOM_UTF16_BE:
        encoding = "utf-16-be"
    file = tmp_path / name
    file.write_bytes(mark + text.encode(encoding))
    assert texts(file, scratch) == [record["text"] for record in RECORDS]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_text_has_no_mark_and_is_told_where_it_is_not_in_its_encoding(
    tmp_path: Path, scratch: Path, encoding: str
) -> None:
    file = tmp_path / "a.md"
    file.write_text("first é\r\nsecond", encoding=encoding, newline="")
    assert texts(file, scratch) == ["first é\r\nsecond"]
    file.write_bytes(file.read_bytes() + b"\n\xff\xdc")
    with pytest.raises(DataError, match=r"a\.md (is not UTF-8 text \(line 3, byte 20\)|begins as UTF-(16|32) but is)"):
        texts(file, scratch)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"a,text\n1,2,3\n", "line 2 has 3 cells, but the first line names 2 columns"),
        ("a.csv", b'a,text\n1,"x\n', "cannot be read as a table"),
        ("a.csv", b"text,text\n1,2\n", "line 1 names the column 'text' twice"),
        ("a.csv", b"body,other\n1,2\n", "no text in field 'text'.*Its fields: 'body', 'other'; --as-text"),
        ("a.csv", b"text\ncaf\xe9\n", "is not UTF-8 text"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\0", r"is packed \(gzip\): unpack it first"),
        ("a.arrow", b"ARROW1\0\0", "save it as Parquet"),
        ("a.txt", b'{"body": "x"}\n', "line 1 has no text.*Its fields: 'body'; --as-text"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "b\\ud83d"}\n',
            r"line 2 holds \\ud83d, half a pair.*Remove",
        ),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', r"line 1 holds \\ud83d"),
        ("a.jsonl", b'{"prompt": "a", "completion": "\\udc00"}\n', r"line 1 holds \\udc00"),
        ("a.json", b'[{"text": "\xed\xa0\x80"}]', r"record 1 holds \\ud800"),
        ("a.jsonl", b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n', "line 1 is a preference.*DPOTrainer"),
        ("a.jsonl", b'{"instruction": "i", "output": "o", "history": [["a", "b"]]}\n', "line 1 has a history"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(
    tmp_path: Path, scratch: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        texts(tmp_path / name, scratch)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_whole_pairs_of_surrogates_and_text_that_speaks_of_them_are_characters(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud834\\udd1e"}\n{"text": "\\\\ud834"}\n')
    assert texts(tmp_path / "a.jsonl", scratch) == ["𝄞", "\\ud834"]


def test_what_only_begins_like_json_is_text(tmp_path: Path, scratch: Path) -> None:
    for name, text in (("a.toml", '[tool]\nname = "x"\n'), ("a.c", "{\n  int a;\n}\n"), ("a.md", '[1] "see"\n')):
        (tmp_path / name).write_text(text)
        assert texts(tmp_path / name, scratch) == [text]


def test_a_table_of_a_directory_is_skipped_unless_it_has_text(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "tree" / "b.csv").write_text("x,text\n1,b\n2,\n")
    documents = Documents([tmp_path / "tree"], scratch=scratch)
    documents.close()
    assert (len(documents), documents.blank) == (1, 1)
    assert documents.skipped.lines()[0].startswith("skipped 1 file (tables without text in column 'text', see")
    assert texts(tmp_path / "tree" / "a.csv", scratch, as_text=True) == ["x,y\n1,2\n"]


def test_columns_of_bytes_are_text_or_refused_with_their_row(tmp_path: Path, scratch: Path) -> None:
    pyarrow, parquet = requirements.package("data", "pyarrow"), requirements.package("data", "pyarrow.parquet")
    file = tmp_path / "rows"  # known by its first bytes
    parquet.write_table(pyarrow.table({"text": [b"one", "é".encode()]}), file)
    assert texts(file, scratch) == ["one", "é"]
    parquet.write_table(pyarrow.table({"text": [b"one", b"caf\xe9"]}), file)
    with pytest.raises(DataError, match=r"rows, row 2 holds bytes that are not UTF-8 text"):
        texts(file, scratch)


def test_a_saved_dataset_is_read_within_its_directory_only(tmp_path: Path, scratch: Path) -> None:
    datasets = requirements.package("data", "datasets")
    datasets.disable_progress_bars()
    for name in ("secret", "data"):
        datasets.Dataset.from_dict({"text": [name]}).save_to_disk(tmp_path / name)
    state = json.loads((tmp_path / "data" / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../secret/" + state["_data_files"][0]["filename"]
    (tmp_path / "data" / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="which is not a file within it"):
        texts(tmp_path / "data", scratch)


SHAREGPT = [{"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]} for turn in TALK]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"conversations": SHAREGPT}, Chat(TALK)),
        ({"conversations": json.dumps(SHAREGPT)}, Chat(TALK)),  # as a cell of a table
        ({"conversation": TALK}, Chat(TALK)),
        ({"conversations": SHAREGPT, "system": "Be brief."}, Chat([{"role": "system", "content": "Be brief."}, *TALK])),
        ({"chosen": TALK, "rejected": TALK[:2]}, None),
        ({"prompt": SHAREGPT[:1], "completion": TALK[1:2]}, Chat(TALK[:2], None, 1)),
        ({"prompt": "p", "completion": "c", "label": True}, Completion("p", "c")),
        ({"instruction": "i", "input": "about", "output": "o"}, Instruction("i", "about", "o")),
        ({"instruction": "i", "output": "o", "text": 3}, Instruction("i", "", "o")),
    ],
)
def test_conversations_are_read_as_they_are_written(record: dict[str, Any], expected: Any) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is a preference"):
            read_record(record, "text")
        assert read_record(record, "chosen") == Chat(TALK)
    else:
        assert read_record(record, "text") == expected


def test_instructions_are_turns_or_alpacas_prompt_without_a_template(tmp_path: Path) -> None:
    for name in ("scratch", "tokenizer"):
        (tmp_path / name).mkdir()
    data = lines(tmp_path, {"instruction": "Add.", "input": "1 2", "output": "3"})
    found = []
    for template in (None, MARKED):
        blocks = blocks_of(tmp_path, data, template=template, seq_len=400, packing=False)
        row = {name: value[None] for name, value in blocks.row(0).items()}
        found.append(shown(tmp_path, row)[0])
        blocks.close()
    turns = "<|im_start|>user\nAdd.\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    assert found[1] == (turns, "3<|im_end|>\n")
    text, trained = found[0]
    assert text.startswith("Below is an instruction that describes a task, paired with an input that provides")
    assert text.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3<|im_end|>")
    assert trained == "3<|im_end|>"


def reader_of(room: Path, template: str, **changed: Any) -> Reader:
    for name in ("scratch", "tokenizer"):
        (room / name).mkdir(exist_ok=True)
    write_tokenizer(room / "tokenizer", template)
    settings = Settings(model_dir=room / "tokenizer", data=[], out=room / "out", **changed)
    return Reader(settings, load_tokenizer(room / "tokenizer", 258), 258, room / "scratch")


def test_roles_that_the_template_does_not_name_are_told_with_their_turns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "bot", "bot", "Assistant")]
    reader = reader_of(tmp_path, PLAIN)
    reader.documents([lines(tmp_path, {"messages": turns}, {"text": " "})])
    told = capfd.readouterr().err
    assert "does not name: 'bot' (2 turns), 'Assistant' (1 turns)." in told
    assert "records left out, since they hold nothing to train on: 1" in told
    data = lines(tmp_path, {"messages": [turns[0], *turns[2:]]})
    with pytest.raises(
        DataError, match=r"no turn .* is the assistant's.*'bot' \(2 turns\), 'user' \(1 turns\).*Rename"
    ):
        reader.documents([data])
    reader.close()
    reader = reader_of(tmp_path, PLAIN, loss_on="all")
    reader.documents([data])
    reader.close()


def test_without_a_template_the_error_names_the_option_and_the_remedy(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, PLAIN)
    reader = Reader(reader._settings, ByteTokenizer(), 258, tmp_path / "scratch")
    data = lines(tmp_path, {"messages": [{"role": "assistant", "content": "x"}]})
    with pytest.raises(DataError, match=r"--eval holds conversations.* no chat template: give .*--tokenizer DIR"):
        reader.documents([data], option="--eval")
    reader.close()
