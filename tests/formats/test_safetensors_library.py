"""Libraries that look for shared memory by address, and safetensors, which reads there: the same files as in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors import torch as library
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")


def build() -> LlamaForCausalLM:
    """Return a model whose head is tied to its embedding."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**tiny_models.SMALLEST_DECODER, tie_word_embeddings=True))


def _without_ties(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}


def save_model(model: nn.Module, out: Path) -> None:
    library.save_model(model, str(out / "model.safetensors"))


def save_file(model: nn.Module, out: Path) -> None:
    library.save_file(_without_ties(model), out / "model.safetensors", metadata={"format": "pt"})


def save_bytes(model: nn.Module, out: Path) -> None:
    (out / "model.bin").write_bytes(library.save(_without_ties(model)))


def save_of_many_dtypes(model: nn.Module, out: Path) -> None:
    others = {
        "a": torch.ones(3, dtype=torch.int64),
        "b": torch.ones(3, dtype=torch.bool),
        "c": torch.ones(3).half(),
        "d": torch.ones(3).to(torch.bfloat16),
        "e": torch.tensor(2.5, dtype=torch.float64),
        "é": torch.ones(0, 3, dtype=torch.uint8),
    }
    library.save_file(_without_ties(model) | others, out / "model.safetensors")


def save_of_a_dtype_that_only_the_library_knows(model: nn.Module, out: Path) -> None:
    library.save_file(_without_ties(model) | {"z": torch.ones(3, dtype=torch.complex64)}, out / "model.safetensors")


def save_views(model: nn.Module, out: Path) -> None:
    weight = model.state_dict()["model.norm.weight"]
    library.save_file({"first": weight[:4], "last": weight[4:]}, out / "model.safetensors")


def load_model(model: nn.Module, out: Path) -> None:
    changed = {name: value.detach().clone() + 1 for name, value in _without_ties(model).items()}
    library.save_file(changed, out / "changed.safetensors")
    assert library.load_model(model, out / "changed.safetensors") == (set(), [])
    library.save_model(model, str(out / "model.safetensors"))


def save_by_the_hub(model: nn.Module, out: Path) -> None:
    import huggingface_hub

    huggingface_hub.save_torch_model(model, out)


def save_by_accelerate(model: nn.Module, out: Path) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(model, out, max_shard_size="8KB")


def save_the_state_by_accelerate(model: nn.Module, out: Path) -> None:
    from accelerate import Accelerator

    Accelerator(cpu=True).save(model.state_dict(), out / "model.safetensors", safe_serialization=True)


def save_distributed(model: nn.Module, out: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save(_without_ties(model), checkpoint_id=out / "distributed")
    read = {name: torch.zeros(value.shape) for name, value in _without_ties(model).items()}
    checkpoint.load(read, checkpoint_id=out / "distributed")
    for file in (out / "distributed").iterdir():
        file.unlink()
    library.save_file(read, out / "model.safetensors")


def merge_adapters(model: nn.Module, out: Path) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model, config).merge_and_unload()
    (out / "tied").write_text(str(merged.config.tie_word_embeddings))
    save_model(merged, out)


def save_adapters_with_the_head(model: nn.Module, out: Path) -> None:
    import peft

    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    adapted.save_pretrained(out)
    (out / "README.md").unlink()


def save_adapters_with_embeddings(model: nn.Module, out: Path) -> None:
    import peft

    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    adapted.save_pretrained(out, save_embedding_layers=True)
    (out / "README.md").unlink()


PROGRAMS = (
    *(save_model, save_file, save_bytes, save_of_many_dtypes, save_of_a_dtype_that_only_the_library_knows),
    *(save_views, load_model, save_by_the_hub, save_by_accelerate, save_the_state_by_accelerate),
    *(save_distributed, merge_adapters, save_adapters_with_the_head, save_adapters_with_embeddings),
)


def content(file: Path) -> Any:
    """Header and data of a file, whose metadata the library writes in any order."""
    text = file.read_bytes()
    if file.suffix != ".safetensors":
        return text
    end = 8 + int.from_bytes(text[:8], "little")
    header = json.loads(text[8:end])
    metadata = header.pop("__metadata__", None)
    return [metadata, list(header.items()), end, text[end:]]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_files_are_those_of_a_model_in_memory(
    offloaded: Callable[..., nn.Module], tmp_path: Path, program: Callable[[nn.Module, Path], None]
) -> None:
    written = []
    for name, model in (("in memory", build()), ("on SSD", offloaded(build()))):
        out = tmp_path / name
        out.mkdir()
        program(model, out)
        files = [file for file in sorted(out.rglob("*")) if file.is_file() and file.name != "adapter_config.json"]
        written.append({file.name: content(file) for file in files})
        assert files
    assert written[1] == written[0]


def test_tensors_that_share_memory_are_found(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(build())
    state = model.state_dict()
    for shared in (state, {"a": state["model.norm.weight"], "b": state["model.norm.weight"][:3]}):
        with pytest.raises(RuntimeError, match="share memory"):
            library.save_file(shared, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not contiguous"):
        library.save_file({"a": state["model.embed_tokens.weight"].t()}, tmp_path / "model.safetensors")
    assert not list(tmp_path.glob("model*"))
    library.save_model(model, str(tmp_path / "model.safetensors"), metadata={"mine": "yes"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"mine": "yes", "model.embed_tokens.weight": "lm_head.weight"}
        assert torch.equal(file.get_tensor("lm_head.weight"), model.lm_head.weight.detach().clone())


def test_a_file_is_written_without_the_whole_model_in_memory(
    offloaded: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memascend.formats import safetensors_library

    model = offloaded(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    alive, most = [0], [0]
    copy_of = safetensors_library.copy_of

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        import weakref

        copy = copy_of(tensor)
        alive[0] += copy.nbytes
        most[0] = max(most[0], alive[0])
        nbytes = copy.nbytes
        weakref.finalize(copy, lambda: alive.__setitem__(0, alive[0] - nbytes))
        return copy

    monkeypatch.setattr(safetensors_library, "copy_of", counted)
    library.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert 0 < most[0] <= 2 * (256 * 256 + 256) * 4


def test_a_failure_leaves_the_file_that_was_there(offloaded: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = offloaded(build())
    library.save_file(_without_ties(model), tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    state = _without_ties(model)
    memascend.close(model)
    with pytest.raises(memascend.MemascendError, match="closed"):
        library.save_file(state, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.glob("model*"))) == 1
