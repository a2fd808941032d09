"""A Trainer over a store that holds a run already: nothing of the run is used, or changed, that was not asked for."""

from __future__ import annotations

import gc
import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bit_equality
import pytest
from trainer_runs import InterruptAt, build, interrupted, make, weights

import memascend
from memascend.integrations.transformers import MemascendArguments
from memascend.session.api import offload_of

if TYPE_CHECKING:
    from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    build().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def run_found(model_folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Interrupt a run, and return a function that makes a Trainer over its store."""
    interrupted(make(model_folder, tmp_path / "out", offload=True, callbacks=[InterruptAt(5, "on_step_begin")]))

    def again(model: Any = model_folder, **arguments: Any) -> Any:
        trainer = make(model, tmp_path / "out", offload=True, **arguments)
        request.addfinalizer(lambda: memascend.close(trainer.model))
        return trainer

    return again


@pytest.mark.parametrize("in_memory", [False, True], ids=["directory", "model in memory"])
def test_its_weights_are_not_used_in_place_of_those_given(run_found: Any, tmp_path: Path, in_memory: bool) -> None:
    trainer = run_found(build()) if in_memory else run_found()
    uses = {
        "evaluate": trainer.evaluate,
        "predict": lambda: trainer.predict(trainer.eval_dataset),
        "save": lambda: trainer.save_model(str(tmp_path / "saved")),
    }
    for name, use in uses.items():
        used = "saved" if name == "save" else "evaluated"
        with pytest.raises(ValueError, match=rf"holds a run after step 4, and its weights would be {used}.*resume"):
            use()
    assert not (tmp_path / "saved").exists()
    trainer.train(resume_from_checkpoint=True)
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))


def test_a_resumed_model_that_is_given_is_evaluated(run_found: Any, tmp_path: Path) -> None:
    resumed = memascend.resume(tmp_path / "out" / "store", host_memory="64MiB")
    trainer = make(resumed.model, tmp_path / "out")
    assert trainer.evaluate()["eval_loss"] > 0
    memascend.close(resumed.model)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"optim": "sgd"}, r"optim='sgd' \(the run: AdamW\)"),
        ({"optim": "adamw_8bit"}, r"states=8bit \(the run: float32\)"),
        ({"optim_args": "states=bfloat16"}, r"states=bfloat16 \(the run: float32\)"),
        ({"optim_args": "master=False"}, r"master=False \(the run: True\)"),
        ({"weights_dtype": "float32"}, r"weights in bfloat16, the arguments say float32"),
    ],
)
def test_another_optimizer_or_dtype_is_refused(run_found: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run_found(**arguments)
    trainer = run_found(learning_rate=1e-5, optim="adamw_torch_fused")  # the same optimizer, by another name
    trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("word", ["True", "last"])
def test_a_scripts_word_goes_on_with_it(run_found: Any, model_folder: str, tmp_path: Path, word: str) -> None:
    """As HfArgumentParser gives `--resume_from_checkpoint True`, before there is a checkpoint too."""
    begun = run_found()
    with pytest.raises(ValueError, match=r"--resume_from_checkpoint True of a script.*keep_store='replace'"):
        begun.train(resume_from_checkpoint="False")
    begun.train(resume_from_checkpoint=word)
    whole = make(model_folder, tmp_path / "whole", offload=True)
    whole.train(resume_from_checkpoint="None")
    assert bit_equality.difference(weights(begun.model), weights(whole.model)) is None
    memascend.close(begun.model)
    memascend.close(whole.model)
    # Killed before its first durable step, a script begins anew with the same words.
    fresh = make(build(), tmp_path / "fresh", offload=True, max_steps=1)
    fresh.train(resume_from_checkpoint=word)
    assert fresh.state.global_step == 1
    memascend.close(fresh.model)


def test_it_is_replaced_on_request(run_found: Any, model_folder: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser

    parser = HfArgumentParser(MemascendArguments)
    for words, expected in ((["--keep_store"], True), (["--keep_store", "False"], False), ([], None)):
        assert parser.parse_args_into_dataclasses(["--output_dir", "o", *words])[0].keep_store is expected
    (arguments,) = parser.parse_args_into_dataclasses(["--output_dir", "o", "--keep_store", "replace"])
    trainer = run_found(keep_store=arguments.keep_store)
    trainer.train()
    whole = make(model_folder, tmp_path / "whole", offload=True)
    whole.train()
    assert bit_equality.difference(weights(trainer.model), weights(whole.model)) is None
    memascend.close(whole.model)


def test_options_that_the_run_keeps_are_told(run_found: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memascend"):
        run_found(gradients="bfloat16", fused_loss=False)
    told = [record.getMessage() for record in caplog.records if record.name == "memascend"]
    assert any("its own gradients='auto', not with 'bfloat16'" in text for text in told)
    assert any("its own fused_loss='auto', not with False" in text for text in told)


def test_a_directory_without_a_place_for_it_is_refused(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TrainingArguments does not say where it goes: give MemascendArguments"):
        make(model_folder, tmp_path / "out")


@pytest.mark.parametrize("how", ["at the end", "by a call", "every save"])
def test_an_upload_leaves_the_store_out(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The default store lies in the directory that transformers uploads."""
    import transformers.trainer
    from huggingface_hub.utils import filter_repo_objects

    uploaded: list[str] = []

    class Api:
        def create_repo(self, *_: Any, **__: Any) -> Any:
            return type("Repository", (), {"repo_id": "org/model"})()

        def upload_folder(self, *, folder_path: Any, ignore_patterns: Any, **_: Any) -> Any:
            files = [str(file.relative_to(folder_path)) for file in Path(folder_path).rglob("*") if file.is_file()]
            uploaded.extend(filter_repo_objects(files, ignore_patterns=ignore_patterns))
            done: Future[None] = Future()
            done.set_result(None)
            return done

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: Api())
    monkeypatch.setattr(transformers.Trainer, "create_model_card", lambda *_, **__: None)
    options: dict[str, Any] = {"hub_model_id": "org/model", "hub_token": "none", "max_steps": 3}
    if how == "at the end":
        options |= {"push_to_hub": True, "hub_strategy": "end"}
    elif how == "every save":
        options |= {"push_to_hub": True, "hub_strategy": "every_save", "save_only_model": True, "hub_always_push": True}
    trainer = make(model_folder, tmp_path / "out", offload=True, **options)
    model: nn.Module = trainer.model
    trainer.train()
    assert list((tmp_path / "out" / "store").iterdir())
    if how != "every save":
        trainer.push_to_hub()
    assert "model.safetensors" in uploaded or how == "every save"
    assert uploaded and not [name for name in uploaded if "memascend" in name], uploaded
    memascend.close(model)


def test_a_trainer_that_is_gone_is_freed(model_folder: str, tmp_path: Path) -> None:
    """A tracked object may refer to the model: nothing else would end its memory, threads and files."""
    trainer = make(model_folder, tmp_path / "out", offload=True, max_steps=2)
    trainer.train()
    runtime = offload_of(trainer.model).runtime
    del trainer
    gc.collect()
    end = time.monotonic() + 20
    while not runtime.closed and time.monotonic() < end:  # another thread closes it
        time.sleep(0.01)
    assert runtime.closed
