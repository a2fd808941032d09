"""TRL's trainers over an offloaded model give the bits of the same trainers over a model in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requirements
import torch
from bit_equality import differing
from chat_models import TURNS, folder_of, tokenizer
from trainer_runs import logged, weights
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    set_seed,
)

import memascend
from memascend.integrations.transformers import TrainerMixin

if TYPE_CHECKING:
    from torch import nn

datasets = requirements.package("trl", "datasets")
trl = requirements.package("trl")
peft = requirements.package("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benches"))

import held_out  # noqa: E402

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def chats() -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"{n}+{n}?"},
                    {"role": "assistant", "content": f"it is {2 * n}"},
                ]
            }
            for n in range(20)
        ]
    )


def completions() -> Any:
    return datasets.Dataset.from_list([{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(20)])


def preferences() -> Any:
    rows = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(3 * n)} for n in range(20)]
    return datasets.Dataset.from_list(rows)


def run(cls: type, config: type, model: Any, folder: Path, data: Any, options: dict[str, Any], **named: Any) -> Any:
    arguments = config(str(folder), **ARGUMENTS | options)
    sets = {"train_dataset": data, "eval_dataset": data.select(range(4))}
    trainer = cls(model, args=arguments, processing_class=tokenizer(), **sets, **named)
    trainer.train()
    return trainer


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize(
    ("data", "options", "sizes"),
    [
        (chats, {"assistant_only_loss": True}, {}),
        (completions, {"packing": True, "max_length": 64}, {}),
        (completions, {"gradient_checkpointing": False, "bf16": False, "loss_type": "dft"}, {}),
        # Embedding and head are tables: the head is streamed by blocks.
        (chats, {"max_steps": 2}, {"vocab_size": 1 << 17, "tie_word_embeddings": True}),
    ],
    ids=["chats", "packed", "dft", "tables"],
)
def test_fine_tuning(data: Any, options: dict[str, Any], sizes: dict[str, Any], tmp_path: Path) -> None:
    from memascend.integrations.trl import SFTConfig, SFTTrainer

    class InMemory(TrainerMixin, trl.SFTTrainer): ...

    source = folder_of(tmp_path / "model", **sizes)
    whole = memascend.fuse_loss(LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
    expected = run(InMemory, trl.SFTConfig, whole, tmp_path / "in memory", data(), options)
    offload = {"host_memory": "128MiB"}
    trainer = run(SFTTrainer, SFTConfig, source, tmp_path / "out", data(), options | offload)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    assert (tmp_path / "out" / "checkpoint-2" / "chat_template.jinja").read_text() == TURNS
    memascend.close(trainer.model)


def test_accumulated_micro_batches_go_through_each_layer(tmp_path: Path) -> None:
    """Where that is asked for: with the bits of one batch on slices in memory, near accumulation."""
    from memascend.integrations.trl import SFTConfig, SFTTrainer

    class InMemory(TrainerMixin, trl.SFTTrainer): ...

    def in_memory(slices: bool, **options: Any) -> Any:
        model = memascend.fuse_loss(LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
        model = memascend.run_in_slices(model, 1) if slices else model
        return run(InMemory, trl.SFTConfig, model, tmp_path / str(slices), chats(), common | options)

    source = folder_of(tmp_path / "model")
    common = {"max_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    expected = in_memory(True, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    offload = {"host_memory": "128MiB", "accumulate_in_layers": True}
    trainer = run(SFTTrainer, SFTConfig, source, tmp_path / "out", chats(), common | offload)
    assert (trainer.args.micro_batch_size, trainer.args.gradient_accumulation_steps) == (1, 1)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    accumulated = in_memory(False)
    losses = [[entry["loss"] for entry in logged(each) if "loss" in entry] for each in (trainer, accumulated)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and len(losses[0]) == 2
    memascend.close(trainer.model)
    with pytest.raises(ValueError, match="leave micro_batch_size out"):
        SFTConfig(str(tmp_path / "none"), **common | offload, micro_batch_size=2)


def test_the_dtype_and_attention_of_model_init_kwargs_count_and_the_rest_is_refused(tmp_path: Path) -> None:
    from memascend.integrations.trl import SFTConfig, SFTTrainer

    source = folder_of(tmp_path / "model")

    def opened(name: str, **kwargs: Any) -> Any:
        args = SFTConfig(str(tmp_path / name), **ARGUMENTS, host_memory="64MiB", model_init_kwargs=kwargs)
        return SFTTrainer(source, args, train_dataset=chats(), eval_dataset=chats(), processing_class=tokenizer())

    with pytest.raises(ValueError, match=r"model_init_kwargs has revision='other', and only dtype and attn_impl"):
        opened("refused", dtype="float32", revision="other")
    # As TRL's own scripts give them, whatever was asked for.
    plain = {"revision": "main", "trust_remote_code": False, "attn_implementation": None}
    for name, kwargs, attention in (("plain", plain, "sdpa"), ("eager", {"attn_implementation": "eager"}, "eager")):
        model = opened(name, dtype=torch.float32, **kwargs).model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert model.config._attn_implementation == attention
        memascend.close(model)


def test_preferences_with_an_adapter(tmp_path: Path) -> None:
    from memascend.integrations.trl import DPOConfig, DPOTrainer

    class InMemory(TrainerMixin, trl.DPOTrainer): ...

    def adapter() -> Any:
        return peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])

    source = folder_of(tmp_path / "model")
    whole = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected = run(InMemory, trl.DPOConfig, whole, tmp_path / "in memory", preferences(), {}, peft_config=adapter())
    offload = {"host_memory": "128MiB"}
    trainer = run(DPOTrainer, DPOConfig, source, tmp_path / "out", preferences(), offload, peft_config=adapter())
    assert logged(trainer) == logged(expected)
    assert not differing(trained(trainer.model), trained(expected.model))
    assert (tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors").is_file()
    memascend.close(trainer.model)


def test_an_adapter_over_weights_that_stay_in_their_files(tmp_path: Path) -> None:
    """As docs/how-to/adapters.md has it, with the durability and the checkpoints that are the default."""
    from memascend.integrations.trl import SFTConfig, SFTTrainer

    class InMemory(TrainerMixin, trl.SFTTrainer): ...

    def adapter() -> Any:
        return peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])

    source = folder_of(tmp_path / "model")
    options = {"max_steps": 2}
    whole = memascend.fuse_loss(LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
    expected = run(InMemory, trl.SFTConfig, whole, tmp_path / "in memory", chats(), options, peft_config=adapter())
    model = memascend.from_pretrained(source, store=tmp_path / "store", host_memory="64MiB", frozen="files")
    trainer = run(SFTTrainer, SFTConfig, model, tmp_path / "out", chats(), options, peft_config=adapter())
    assert logged(trainer) == logged(expected)
    assert not differing(trained(trainer.model), trained(expected.model))
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    memascend.close(model)


@pytest.mark.parametrize("where", ["the trainer", "model_init_kwargs"])
def test_a_configuration_of_quantised_weights_is_refused(tmp_path: Path, where: str) -> None:
    """TRL's scripts give one with --load_in_4bit: weights in bfloat16 would be trained, or be adapted, in its place."""
    from memascend.integrations.trl import SFTConfig, SFTTrainer

    source = folder_of(tmp_path / "model")
    of_four_bits = {"load_in_4bit": True}  # TRL hands it on as it is
    init, named = ({}, {"quantization_config": of_four_bits})
    if where == "model_init_kwargs":
        init, named = {"model_init_kwargs": {"quantization_config": of_four_bits}}, {}
    args = SFTConfig(str(tmp_path / "out"), **ARGUMENTS, host_memory="64MiB", **init)
    adapter = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"])
    with pytest.raises(ValueError, match="quantization_config"):
        SFTTrainer(source, args, train_dataset=chats(), processing_class=tokenizer(), peft_config=adapter, **named)
    assert not list((tmp_path / "out").rglob("memascend*"))


def test_preferences_beside_a_reference(tmp_path: Path) -> None:
    from memascend.integrations.trl import DPOConfig, DPOTrainer

    class InMemory(TrainerMixin, trl.DPOTrainer): ...

    source = folder_of(tmp_path / "model")
    pair = (LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16) for _ in range(2))
    expected = run(InMemory, trl.DPOConfig, next(pair), tmp_path / "in memory", preferences(), {}, ref_model=next(pair))
    offload = {"host_memory": "128MiB"}
    with pytest.raises(ValueError, match="give ref_model=memascend"):
        run(DPOTrainer, DPOConfig, source, tmp_path / "out", preferences(), offload)
    (tmp_path / "reference").mkdir()
    reference = memascend.from_pretrained(source, store=tmp_path / "reference", host_memory="64MiB", frozen="files")
    trainer = run(DPOTrainer, DPOConfig, source, tmp_path / "out", preferences(), offload, ref_model=reference)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    memascend.close(trainer.model)
    memascend.close(reference)


@pytest.mark.parametrize("kind", ["rewards", "causal"])
def test_rewards(tmp_path: Path, kind: str) -> None:
    from memascend.integrations.trl import RewardConfig, RewardTrainer

    class InMemory(TrainerMixin, trl.RewardTrainer): ...

    if kind == "rewards":
        source = folder_of(tmp_path / "model", LlamaForSequenceClassification, num_labels=1)
    else:
        source = folder_of(tmp_path / "model")
    set_seed(42)  # As TRL does before it opens a model: a new head is drawn.
    whole = LlamaForSequenceClassification.from_pretrained(source, dtype=torch.bfloat16, num_labels=1)
    expected = run(InMemory, trl.RewardConfig, whole, tmp_path / "in memory", preferences(), {})
    offload = {"host_memory": "128MiB"}
    trainer = run(RewardTrainer, RewardConfig, source, tmp_path / "out", preferences(), offload)
    assert logged(trainer) == logged(expected)
    assert not differing(weights(trainer.model), weights(expected.model))
    memascend.close(trainer.model)


def test_held_out_loss_beside_trl_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`memascend finetune` and TRL's own trainer with PyTorch's AdamW learn alike from the same chats in one order."""
    source = folder_of(tmp_path / "model", max_position_embeddings=256)
    words = [source, "--steps", "12", "--batch-size", "2", "--lr", "5e-3", "--host-memory", "64MiB"]
    room = tmp_path / "room"
    room.mkdir()
    found = held_out.compare(Path(source), room, held_out.parser().parse_args(words))
    assert found["trl"] < 0.8 * found["before"]
    assert found["apart"] <= held_out.APART_MAX / 10, found
    ours, theirs, with_our_arithmetic = found["losses_of_steps"].values()
    assert len(ours) == len(theirs) == 12
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours == with_our_arithmetic and not found["tensors_of_other_bits"]
