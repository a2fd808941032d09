"""`--boundaries`: packed documents that do not see each other, the lines about them, and runs from before it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from commands import in_memory, words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig

from memascend.cli import main
from memascend.cli.boundaries import with_boundaries
from memascend.cli.data import ByteTokenizer, Documents, TokenBlocks
from memascend.cli.data.sequences import Sequences
from memascend.cli.settings import Settings
from memascend.errors import DataError

SEQ_LEN = 32


def write(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def blocks_of(room: Path, texts: list[str], *, seq_len: int = SEQ_LEN, boundaries: bool = True) -> TokenBlocks:
    """Return packed texts in the order in which they are given."""
    scratch = room / f"scratch-{len(list(room.iterdir()))}"
    scratch.mkdir()
    documents = Documents([write(scratch / "data.jsonl", texts)], scratch=scratch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memascend.cli.data.blocks.shuffled", lambda index, _count, _key: index)
        try:
            options: dict[str, Any] = {"seed": 0, "vocab_size": 258, "boundaries": boundaries}
            return TokenBlocks(documents, ByteTokenizer(), scratch=scratch, seq_len=seq_len, **options)
        finally:
            documents.close()


def test_positions_begin_anew_and_a_first_token_is_not_trained_on(tmp_path: Path) -> None:
    blocks = blocks_of(tmp_path, ["abc", "de", "fghijklmnop", "q"], seq_len=8)
    first, second = blocks.row(0), blocks.row(1)
    ids = [*b"abc", 256, *b"de", 256, *b"f"]
    assert first["input_ids"].tolist() == ids
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert first["labels"].tolist() == [-100, *ids[1:4], -100, *ids[5:7], -100]
    # The rest of a document that a sequence ends in is one of its own.
    assert second["position_ids"].tolist() == list(range(8))
    assert second["labels"].tolist() == [*b"ghijklmn"]
    batch = blocks.padded([first, second])
    assert batch["position_ids"].shape == (2, 8)
    blocks.close()
    plain = blocks_of(tmp_path, ["abc", "de", "fghijklmnop", "q"], seq_len=8, boundaries=False)
    assert plain.row(0).keys() == {"input_ids", "labels"} and plain.row(0)["labels"].tolist() == ids
    plain.close()


def test_a_sequence_of_first_tokens_is_left_out(tmp_path: Path) -> None:
    """As of documents that are only an end: it has no loss."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    sequences = Sequences(scratch, 4, packing=True, boundaries=True)
    for number in range(8):
        sequences.add(array("i", [number]))
        sequences.end_document()
    sequences.flush()
    assert (len(sequences), sequences.untrained, sequences.tokens) == (0, 2, 8)
    sequences.close()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_of_a_document_does_not_depend_on_its_neighbours(tmp_path: Path, attention: str) -> None:
    model_dir = tiny_models.llama_directory(tmp_path, hidden=64)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=attention)

    def losses(texts: list[str], boundaries: bool) -> torch.Tensor:
        """Return the losses of the tokens of the last text, as long as the others leave of a sequence."""
        blocks = blocks_of(tmp_path, texts, boundaries=boundaries)
        batch = blocks.padded([blocks.row(0)])
        blocks.close()
        with torch.no_grad():
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
        every = torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="none")
        return every[-len(texts[-1]) - 1 :]  # with the end of the document

    last = "a document of its own"
    before = ["x" * (SEQ_LEN - len(last) - 2), "y" * (SEQ_LEN - len(last) - 2)]
    found = [losses([text, last], boundaries=True) for text in before]
    assert torch.equal(*found)
    assert found[0][0] == 0 and (found[0][1:] > 0).all()  # its first token is not trained on
    assert not torch.equal(*(losses([text, last], boundaries=False) for text in before))


def settled(config: Any, before: dict[str, Any] | None = None, **changed: Any) -> str:
    settings = Settings(model_dir=Path("none"), data=[], out=Path("out"), **changed)
    return with_boundaries(settings, config, before or {}).boundaries


def test_it_is_said_whether_there_are_boundaries(capfd: pytest.CaptureFixture[str]) -> None:
    def said() -> str:
        return capfd.readouterr().err

    llama = LlamaConfig(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    bloom = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    assert settled(llama) == "on"
    assert "packing documents with boundaries" in said()
    assert settled(llama, boundaries="off") == "off"
    assert "without boundaries: each attends to those before it in its sequence (as --boundaries off says)" in said()
    assert settled(llama, seq_len=4096) == "off"
    assert "more than 2,048 tokens they come with --boundaries on alone" in said()
    assert settled(llama, seq_len=4096, boundaries="on") == "on"
    assert settled(bloom) == "off"
    assert "without boundaries" in (told := said()) and "a bloom model takes no boundaries" in told
    with pytest.raises(DataError, match=r"--boundaries on: the attention of a bloom model"):
        settled(bloom, boundaries="on")
    assert settled(llama, {"seed": 0}) == "off"
    assert "as in the run that goes on" in said()
    assert settled(llama, {"boundaries": "on"}) == "on"
    said()
    assert settled(llama, packing=False) == "off" and not said()


def test_a_run_with_boundaries_is_that_in_memory_and_goes_on_as_it_began(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_models.llama_directory(tmp_path, hidden=64, layers=2)
    data = write(tmp_path / "data.jsonl", [f"{number}, and {number}" * (1 + number % 3) for number in range(60)])
    common: dict[str, Any] = {"data": data, "batch_size": 2, "steps": 3, "lr": 1e-3, "schedule": "constant"}

    def run(out: str, *more: str, store: str = "store", **changed: Any) -> dict[str, torch.Tensor]:
        words = words_of(model_dir, tmp_path / out, tmp_path / store, **common | changed)
        code = main.main([*(in_memory(words) if store == "memory" else words), *more])
        assert code == 0, capfd.readouterr().err
        return load_file(tmp_path / out / "model.safetensors")

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(value, other[name]) for name, value in one.items())

    whole = run("whole", "--micro-batch-size", "1")
    assert "packing documents with boundaries" in capfd.readouterr().err
    assert same(run("memory", "--micro-batch-size", "1", store="memory"), whole)
    without = run("without", "--boundaries", "off", store="store-off")
    assert not same(run("with", store="store-on"), without)
    # Of before there were boundaries: nothing is recorded of them.
    decisive = Settings.decisive.fget
    assert decisive is not None
    with monkeypatch.context() as patch:
        before = property(lambda self: {k: v for k, v in decisive(self).items() if k != "boundaries"})
        patch.setattr(Settings, "decisive", before)
        run("short", "--boundaries", "off", "--keep-store", store="old", steps=2)
    capfd.readouterr()
    assert same(run("longer", "--resume", "--change", store="old"), without)
    assert "without boundaries" in capfd.readouterr().err
    run("kept", "--boundaries", "off", "--keep-store", store="other", steps=2)
    words = words_of(model_dir, tmp_path / "no", tmp_path / "other", **common)
    assert main.main([*words, "--resume", "--change", "--boundaries", "on"]) == main.BAD_INPUT
    assert "--boundaries is on, but the run in the store has off" in capfd.readouterr().err


def test_boundaries_are_of_packed_documents(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = words_of(tmp_path / "model", tmp_path / "out", tmp_path / "store", data=tmp_path)
    assert main.main([*words, "--no-packing", "--boundaries", "on"]) == main.BAD_INPUT
    assert "--boundaries works only with packed documents" in capfd.readouterr().err
