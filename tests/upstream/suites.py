"""The tests that are run of each library, their replacements, and refusals on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field

_OURS = "upstream.offloading"
_ACCELERATE = "memascend.integrations.accelerate"


@dataclass(frozen=True)
class Suite:
    """The tests of one library."""

    files: tuple[str, ...]
    #: Arguments of pytest.
    options: tuple[str, ...] = ()
    #: (module, name) of theirs: (module, name) of ours.
    substitutes: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    #: Names that a checkout's tests import and the installed version may not have: tests that use one are skipped.
    gone: tuple[tuple[str, str], ...] = ()
    #: A part of a message with which we refuse something on purpose, and the thing refused.
    refused: dict[str, str] = field(default_factory=dict)
    #: A part of a test's name, and why the test does not apply to us.
    not_ours: dict[str, str] = field(default_factory=dict)


SUITES = {
    "transformers": Suite(
        files=("tests/trainer/test_trainer.py", "tests/trainer/test_trainer_callback.py"),
        substitutes={
            ("transformers", "Trainer"): (_OURS, "Trainer"),
            ("transformers", "TrainingArguments"): (_OURS, "TrainingArguments"),
        },
        gone=(("transformers", "GlueDataset"), ("transformers", "GlueDataTrainingArguments")),
        refused={
            "keeps states in memory and reads whole weights": "an optimizer of PyTorch over offloaded weights",
            "cannot be streamed: choose one of": "an optimizer that we do not have",
            "holds a run after step": "a second run over the store of the first",
            "model_init makes models anew": "model_init",
            "auto_find_batch_size begins anew": "auto_find_batch_size",
        },
        not_ours={
            "test_optim_supported_0_adamw_torch": "expects PyTorch's AdamW",
            "test_training_arguments_are_left_untouched": "each run has a store of its own, which its arguments name",
            "test_can_resume_training": "all but the last: resume_from_checkpoint=True begins where there is no run",
            **dict.fromkeys(
                (
                    "test_save_checkpoints",
                    "test_save_best_checkpoint",
                    "test_resume_batch_order",
                    "test_resume_from_interrupted_training",
                    "test_resume_training_with_checkpoint",
                    "test_resume_training_with_shard_checkpoint",
                ),
                "reads a checkpoint's weights from its directory: they are in the store",
            ),
            **dict.fromkeys(
                (
                    "test_custom_callback_added_at_init",
                    "test_default_callbacks_are_present",
                    "test_event_flow",
                    "test_printer_callback_when_tqdm_disabled",
                ),
                "expects no callback but those it names: ours records where the run is",
            ),
        },
    ),
    "trl": Suite(
        files=("tests/test_sft_trainer.py",),
        # A kernel of Liger fails without a GPU, and leaves later tests of the process patched.
        options=("-k", "not liger"),
        substitutes={("trl", name): (_OURS, name) for name in ("SFTTrainer", "SFTConfig")},
        gone=(
            ("trl.trainer.sft_trainer", "_chunked_cross_entropy_loss"),
            ("trl.trainer.sft_trainer", "_patch_chunked_ce_lm_head"),
            ("trl.trainer.sft_trainer", "dft_loss"),
            ("trl.import_utils", "is_joblib_available"),
        ),
    ),
    "peft": Suite(
        files=("tests/test_decoder_models.py",),
        options=("-k", "LlamaForCausalLM"),
        refused={"its forward is not deterministic; pass recompute=False": "activated LoRA with recomputation"},
        substitutes={
            ("transformers", "AutoModelForCausalLM"): (_OURS, "AutoModelForCausalLM"),
            ("transformers", "Trainer"): ("memascend.integrations.transformers", "Trainer"),
        },
    ),
    "accelerate": Suite(
        files=tuple(
            f"tests/test_{name}.py"
            for name in ("accelerator", "optimizer", "scheduler", "grad_sync", "state_checkpointing")
        ),
        substitutes={("accelerate", "Accelerator"): ("memascend.integrations.accelerate", "Accelerator")},
        refused={"processes were launched: an offloaded model trains in one process": "several processes"},
    ),
}
