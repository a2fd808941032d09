"""`memascend finetune --task embed`: the bits of sentence-transformers' trainer in memory, and refusals."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from bit_equality import differing
from chat_models import folder_of, tokenizer
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, LlamaModel, set_seed

import memascend
from memascend.cli import main
from memascend.integrations.transformers import TrainerMixin

if TYPE_CHECKING:
    from pathlib import Path

datasets = requirements.package("trl", "datasets")
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [{"negative": f"{n}-{n}", "positive": f"{2 * n} is it", "anchor": f"what is {n}+{n}"} for n in range(8)]
STEPS = 3


@pytest.fixture
def sentences() -> Any:
    return pytest.importorskip("sentence_transformers", reason="pip install 'memascend[embed]'")


@pytest.fixture
def room(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, vocab_size=128)).to(torch.bfloat16).save_pretrained(tmp_path / "encoder")
    tokenizer().save_pretrained(tmp_path / "encoder")
    folder_of(tmp_path / "decoder", LlamaModel)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def words(room: Path, model: str, *others: str, out: str = "out", steps: int = STEPS) -> list[str]:
    chosen = ["finetune", str(room / model), "--task", "embed", "--data", str(room / "rows.jsonl")]
    chosen += ["--out", str(room / out), "--store", str(room / "store"), "--host-memory", "64MiB"]
    chosen += ["--steps", str(steps), "--batch-size", "4", "--lr", "1e-2", "--schedule", "constant"]
    return [*chosen, "--seq-len", "16", "--dtype", "bfloat16", *others]


def in_memory(room: Path, model: str, sentences: Any) -> Any:
    """Return the model in memory that the same trainer has trained."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    class InMemory(TrainerMixin, sentences.SentenceTransformerTrainer): ...

    set_seed(0)
    whole = sentences.SentenceTransformer(str(room / model), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    whole.max_seq_length = 16
    args = sentences.SentenceTransformerTrainingArguments(
        str(room / "in memory"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        seed=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_list(ROWS).select_columns(["anchor", "positive", "negative"])
    InMemory(whole, args, train_dataset=rows, loss=MultipleNegativesRankingLoss).train()
    return whole


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_it_has_the_bits_of_the_trainer_in_memory(
    room: Path, model: str, sentences: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words(room, model)) == 0, capfd.readouterr().err
    expected = in_memory(room, model, sentences)
    assert not differing(load_file(room / "out" / "model.safetensors"), dict(expected[0].auto_model.state_dict()))
    saved = sentences.SentenceTransformer(str(room / "out"), device="cpu")
    texts = ["what is 3+3", "6 is it"]
    assert torch.equal(saved.encode(texts, convert_to_tensor=True), expected.encode(texts, convert_to_tensor=True))
    assert saved.max_seq_length == 16
    assert not list((room / "store").glob("*"))


def test_it_goes_on_with_the_same_bits(room: Path, sentences: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(words(room, "encoder", "--keep-store", steps=2)) == 0, capfd.readouterr().err
    assert main.main(words(room, "encoder", "--resume", "--change")) == 0, capfd.readouterr().err
    expected = in_memory(room, "encoder", sentences)
    assert not differing(load_file(room / "out" / "model.safetensors"), dict(expected[0].auto_model.state_dict()))


def test_weights_of_other_modules_are_refused(room: Path, sentences: Any) -> None:
    from sentence_transformers.sentence_transformer import modules
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss, SoftmaxLoss

    from memascend.integrations.sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    encoder = modules.Transformer(str(room / "encoder"))
    dense = modules.Dense(32, 8)
    whole = sentences.SentenceTransformer(modules=[encoder, modules.Pooling(32), dense], device="cpu")
    whole.save(str(room / "with dense"))
    rows = datasets.Dataset.from_list(ROWS)
    args = SentenceTransformerTrainingArguments(str(room / "out"), host_memory="64MiB", use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"other modules have weights to be trained, 2\.linear\.weight"):
        SentenceTransformerTrainer(
            str(room / "with dense"), args, train_dataset=rows, loss=MultipleNegativesRankingLoss
        )
    with pytest.raises(ValueError, match="SoftmaxLoss has weights to be trained"):
        SentenceTransformerTrainer(
            str(room / "encoder"), args, train_dataset=rows, loss=lambda model: SoftmaxLoss(model, 32, 2)
        )
    assert not list((room / "out" / "store").iterdir())
    # A model in memory leaves it, with all of its modules.
    trainer = SentenceTransformerTrainer(whole, args, train_dataset=rows, loss=MultipleNegativesRankingLoss)
    memascend.close(trainer.model)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (["--lora-rank", "4"], "--task embed trains the whole encoder: leave out --lora-rank"),
        (["--tokenizer", "elsewhere"], "--tokenizer"),
    ],
)
def test_what_does_not_go_together_is_refused(
    room: Path, others: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words(room, "encoder", *others)) == main.BAD_INPUT
    assert told in capfd.readouterr().err


def test_a_missing_package_is_named(
    room: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.delitem(sys.modules, "memascend.integrations.sentence_transformers", raising=False)
    assert main.main(words(room, "encoder")) == main.BAD_INPUT
    assert "--task embed needs sentence_transformers: pip install 'memascend[embed]'" in capfd.readouterr().err
    assert not (room / "out").exists()
