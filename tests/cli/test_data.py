"""Data: the documents read, their order, and that memory does not grow with them."""

import json
import tracemalloc

import pytest
import torch

from memascend import CheckpointError
from memascend.cli.data import (
    END_OF_DOCUMENT,
    PIECE_BYTES,
    ByteTokenizer,
    Documents,
    TokenBlocks,
    load_tokenizer,
    shuffled,
)
from memascend.errors import DataError


@pytest.fixture
def scratch(tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def text_of(documents, number):
    return "".join(documents.document(number).pieces)


def texts(paths, scratch, **options):
    documents = Documents(paths, scratch=scratch, **options)
    try:
        return [text_of(documents, i) for i in range(len(documents))]
    finally:
        documents.close()


def make_blocks(paths, scratch, *, seq_len=16, seed=0, tokens_max=None, vocab_size=258):
    documents = Documents(paths, scratch=scratch)
    try:
        return TokenBlocks(
            documents,
            ByteTokenizer(),
            scratch=scratch,
            seq_len=seq_len,
            seed=seed,
            vocab_size=vocab_size,
            tokens_max=tokens_max,
        )
    finally:
        documents.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000])
def test_shuffled_is_a_permutation(count):
    assert sorted(shuffled(i, count, "a key") for i in range(count)) == list(range(count))


def test_shuffled_depends_on_its_key_and_on_nothing_else():
    one, again, other = ([shuffled(i, 1000, key) for i in range(1000)] for key in ("one", "one", "other"))
    assert one == again
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 20
    # An order that moved between versions would change the meaning of a seed.
    assert [shuffled(i, 10, "0/documents") for i in range(10)] == PINNED_ORDER


PINNED_ORDER = [0, 7, 6, 9, 4, 5, 8, 1, 2, 3]


def test_a_tree_gives_its_text_files_in_order(tmp_path, scratch):
    tree = tmp_path / "tree"
    (tree / "b").mkdir(parents=True)
    (tree / ".git").mkdir()
    (tree / "b" / "z.py").write_text("second = 2\n")
    (tree / "a.txt").write_text("first, é\n")
    (tree / "binary.bin").write_bytes(b"text\0more")
    (tree / "latin1.txt").write_bytes(b"caf\xe9")
    (tree / "blank.txt").write_text(" \n\n")
    (tree / ".hidden").write_text("hidden")
    (tree / ".git" / "config").write_text("hidden")
    (tree / "other.jsonl").write_text('{"no": "text here"}\n')
    (tree / "some.jsonl").write_text('{"text": "third"}\n{"text": " "}\n\n{"text": "fourth"}\n')
    (tree / "dangling").symlink_to(tmp_path / "nowhere")
    documents = Documents([tree], scratch=scratch)
    found = [text_of(documents, i) for i in range(len(documents))]
    documents.close()
    assert found == ["first, é\n", "third", "fourth", "second = 2\n"]
    assert documents.skipped.lines() == [
        f"skipped 1 file (binary): {tree}/binary.bin",
        f"skipped 1 file (not UTF-8 text): {tree}/latin1.txt",
        f"skipped 1 file (JSON without text in field 'text', see --text-field and --as-text): {tree}/other.jsonl",
    ]


def test_what_was_skipped_is_counted_with_examples(tmp_path, scratch):
    (tmp_path / "tree").mkdir()
    for number in range(5):
        (tmp_path / "tree" / f"{number}.txt").write_text(f"é {number}", encoding="latin-1")
    (tmp_path / "tree" / "a.jsonl").write_text("not JSON")
    with pytest.raises(DataError, match=r"no text in .*; skipped 5 files \(not UTF-8 text\)"):
        Documents([tmp_path / "tree"], scratch=scratch)
    (tmp_path / "tree" / "b.txt").write_text("text")
    documents = Documents([tmp_path / "tree"], scratch=scratch)
    documents.close()
    tree = tmp_path / "tree"
    assert documents.skipped.lines() == [
        f"skipped 5 files (not UTF-8 text): {tree}/0.txt, {tree}/1.txt, {tree}/2.txt, ...",
        f"skipped 1 file (JSON that is no records, see --as-text): {tree}/a.jsonl",
    ]
    assert len(documents.skipped) == 6


@pytest.mark.parametrize(
    "text",
    [
        "é" * PIECE_BYTES,
        "line é\n" * 50_000,
        "x" * (3 * PIECE_BYTES + 1) + "\nend",
        "\n" * (2 * PIECE_BYTES) + "a",
    ],
    ids=["one long line", "many lines", "long then short", "blank lines"],
)
def test_pieces_put_together_are_the_text(tmp_path, scratch, text):
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    documents = Documents([tmp_path / "a.txt", tmp_path / "b.jsonl"], scratch=scratch)
    for index in range(2):
        pieces = list(documents.document(index).pieces)
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 2 * PIECE_BYTES
    documents.close()


def test_a_field_of_another_name(tmp_path, scratch):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert texts([tmp_path / "a.jsonl"], scratch, text_field="body") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", b"", "no text"),
        ("blank.txt", b"  \n \n", "no text"),
        ("binary.txt", b"\0\1\2", "not UTF-8 text"),
        ("latin.txt", b"caf\xe9", "not UTF-8 text"),
        ("empty.jsonl", b"\n", "no text"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("field.jsonl", b'{"txt": "a"}\n', "line 1 has no text in field 'text'"),
        ("array.jsonl", b"[1]\n", "is no array of objects"),
        ("seven.jsonl", b"7\n", "line 1 is no object"),
        ("number.jsonl", b'{"text": 3}\n', "line 1 has no text"),
    ],
)
def test_data_without_text_is_refused(tmp_path, scratch, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        Documents([tmp_path / name], scratch=scratch)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


RECORDS = [
    {"text": 'one "]}{[" \\\\ \n'},
    {"more": [{"text": "inner"}], "text": "two é"},
    {"text": " "},
    {"text": "three"},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_is_read_as_records(tmp_path, scratch, indent):
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "a.json"
    file.write_text(" " + json.dumps(RECORDS, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    expected = [record["text"] for record in RECORDS if record["text"].strip()]
    assert texts([file], scratch) == expected
    assert texts([tmp_path / "tree"], scratch) == expected
    file.write_text("\n".join(map(json.dumps, RECORDS)))  # lines under the name of an array
    assert texts([file], scratch) == expected


def test_an_array_is_not_held_in_memory(tmp_path, scratch):
    peaks = []
    for count in (2_000, 40_000):
        file = tmp_path / "a.json"
        file.write_text(json.dumps([{"text": f"document {number}"} for number in range(count)]))
        tracemalloc.start()
        found = texts_count([file], scratch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found == count
    assert peaks[1] < 1.25 * peaks[0] + 200_000, peaks


def texts_count(paths, scratch):
    documents = Documents(paths, scratch=scratch)
    documents.close()
    return len(documents)


OTHER_JSON = {
    "an object": '{\n  "name": "package"\n}',
    "an object on one line": '{"name": "package"}',
    "strings": '["text", "text"]',
    "numbers": "[1, 2]",
    "damaged": '[{"text": "one"',
}


@pytest.mark.parametrize("kind", OTHER_JSON)
def test_other_json_is_text_only_where_that_was_asked_for(tmp_path, scratch, kind):
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "package.json"
    file.write_text(OTHER_JSON[kind])
    with pytest.raises(DataError, match=r"package\.json.*--as-text trains on a file as it is"):
        texts([file], scratch)
    with pytest.raises(DataError, match=r"no text in .*; skipped 1 file \(JSON .*see .*--as-text\)"):
        texts([tmp_path / "tree"], scratch)
    assert texts([file, tmp_path / "tree"], scratch, as_text=True) == [OTHER_JSON[kind]] * 2


def test_an_array_of_other_objects_is_refused_where_it_was_named(tmp_path, scratch):
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "a.json"
    file.write_text('[{"body": "text"}]')
    with pytest.raises(DataError, match=r"a\.json, record 1 has no text in field 'text': name it"):
        texts([file], scratch)
    assert texts([file], scratch, text_field="body") == ["text"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"text": "one"}, {"txt": "two"}]', "record 2 has no text"),
        ('[{"text": "one"}, 2, {"text": "three"}]', "after record 1: at byte 16 there is no JSON"),
        ('[{"text": "one"}, {"text": }]', "record 2 is not JSON"),
        ('[{"text": "one"}, {"text": "tw', "after record 1: it ends within the array"),
        ('[{"text": "one"}] {"text": "two"}', "after record 1: at byte 17 there is no JSON"),
        ('[{"text": "one"} {"text": "two"}]', "after record 1: at byte 16 there is no JSON"),
    ],
)
def test_an_array_that_goes_on_otherwise_is_refused(tmp_path, scratch, content, says):
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(DataError, match=rf"a\.json, {says}"):
        texts([file], scratch)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number:02} " * (number + 1))
    return folder


def test_blocks_hold_every_document_once_with_a_separator(corpus, scratch):
    blocks = make_blocks([corpus], scratch, seq_len=16)
    ids = torch.cat([blocks.row(i)["input_ids"] for i in range(len(blocks))]).tolist()
    total = blocks.tokens
    blocks.close()
    expected = {path.read_bytes() for path in corpus.iterdir()}
    assert total == sum(map(len, expected)) + len(expected)
    assert len(ids) == total // 16 * 16
    documents, rest = [], []
    for token in ids:
        if token == END_OF_DOCUMENT:
            documents.append(bytes(rest))
            rest = []
        else:
            rest.append(token)
    assert len(documents) >= 28
    assert set(documents) <= expected
    assert documents != sorted(documents), "the documents are not shuffled"


def test_an_epoch_has_every_block_once_and_the_next_one_another_order(corpus, scratch):
    blocks = make_blocks([corpus], scratch)
    count = len(blocks)
    stored = sorted(tuple(blocks.row(i)["input_ids"].tolist()) for i in range(count))
    epochs = [[tuple(blocks.batch(e * count + i, 1)["input_ids"][0].tolist()) for i in range(count)] for e in range(2)]
    pairs = blocks.batch(1, 2)["input_ids"]
    blocks.close()
    assert count > 100
    assert sorted(epochs[0]) == stored == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert [tuple(row.tolist()) for row in pairs] == epochs[0][2:4]  # the batch size does not change the order


def test_a_seed_gives_the_same_batches_and_another_seed_gives_others(corpus, tmp_path):
    batches = []
    for number, seed in enumerate((7, 7, 8)):
        scratch = tmp_path / f"scratch{number}"
        scratch.mkdir()
        blocks = make_blocks([corpus], scratch, seed=seed)
        batches.append([blocks.batch(i, 2) for i in range(5)])
        blocks.close()
    for one, again in zip(batches[0], batches[1], strict=True):
        assert torch.equal(one["input_ids"], again["input_ids"])
        assert torch.equal(one["labels"], one["input_ids"])
        assert one["input_ids"].shape == (2, 16)
        assert one["input_ids"].dtype == torch.int64
    assert not torch.equal(batches[0][0]["input_ids"], batches[2][0]["input_ids"])


def test_no_more_is_tokenised_than_asked_for(corpus, scratch):
    blocks = make_blocks([corpus], scratch, tokens_max=200)
    blocks.close()
    assert 200 <= blocks.tokens < 200 + 30 * 12 + 1


def test_too_little_data_and_a_foreign_tokenizer_are_refused(corpus, tmp_path, scratch):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match="6 tokens, fewer than one sequence of 16"):
        make_blocks([tmp_path / "short.txt"], scratch)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        make_blocks([corpus], scratch, vocab_size=100)


def test_byte_tokens_need_a_vocabulary_of_that_size(tmp_path):
    tokenizer = load_tokenizer(tmp_path, 258)
    assert tokenizer.decode([*tokenizer.encode("né"), END_OF_DOCUMENT]) == "né"
    with pytest.raises(CheckpointError, match="--bytes needs a vocabulary of 258 tokens"):
        load_tokenizer(tmp_path, 257, as_bytes=True)


def test_a_broken_tokenizer_is_told_in_a_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path, 1000)
    assert "\n" not in str(caught.value)


def test_host_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for number, lines in enumerate((4_000, 24_000)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open(folder / "a.txt", "w") as text, open(folder / "b.jsonl", "w") as jsonl:
            for line in range(lines):
                text.write(f"line {line} of a long document\n")
                jsonl.write(json.dumps({"text": f"document {line}"}) + "\n")
        scratch = folder / "scratch"
        scratch.mkdir()
        tracemalloc.start()
        blocks = make_blocks([folder / "a.txt", folder / "b.jsonl"], scratch, seq_len=512)
        blocks.batch(3, 4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        blocks.close()
    assert peaks[0] > 100_000  # it did trace something
    assert peaks[1] < 1.25 * peaks[0] + 200_000, peaks
