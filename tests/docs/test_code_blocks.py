"""The code blocks of README.md and docs/: Python runs on a tiny model, commands go through the command's parser."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import pytest
import requirements
import tiny_models
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import memascend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sybil import Example

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if re.search(r"^```(python|sh)$", page.read_text(), flags=re.MULTILINE)
]


def run_python(example: Example) -> None:
    """Run a block with the paths and sizes of a large machine replaced by a test's."""
    source = example.parsed.replace('"/nvme', f'"{Path.cwd()}/nvme')
    source = re.sub(r'"\d+GiB"', '"256MiB"', source)
    # Empty lines make the line numbers of a traceback match the page.
    exec(compile("\n" * example.line + source, example.path, "exec", dont_inherit=True), example.namespace)


def check_commands(example: Example) -> None:
    """Parse each `memascend` command of a block of shell."""
    for command in commands(example.parsed):
        try:
            parser().parse_args(shlex.split(command)[1:])
        except SystemExit:
            raise AssertionError(f"{example.path}:{example.line}: not accepted: {command}") from None


def commands(block: str) -> list[str]:
    """Return the `memascend` commands of a block, each on one line, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.startswith("memascend ")]


def parser() -> Any:
    """Return the command's parser, as the page with all commands gets it."""
    return runpy.run_path(str(ROOT / "docs" / "_hooks.py"))["command_parser"]()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: list[dict[str, torch.Tensor]]) -> None:
    """Run the loop that the pages do not repeat."""
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Loader(list):
    """Batches, with the state that tracked objects have."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"position": 0}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Names that the blocks of a page take for granted: a model directory, data, a loop, and which extras are there."""
    monkeypatch.chdir(tmp_path)
    for drive in ("nvme", "nvme0", "nvme1"):
        Path(drive).mkdir()
    tiny_models.build("llama").save_pretrained("path/to/hf_model")
    mixture = Qwen3MoeConfig(
        **tiny_models.MOE | {"vocab_size": tiny_models.VOCABULARY}, num_experts=4, moe_intermediate_size=192
    )
    Qwen3MoeForCausalLM(mixture).to(torch.bfloat16).save_pretrained("path/to/mixture")
    values: dict[str, Any] = {
        "memascend": memascend,
        "torch": torch,
        "loader": Loader(tiny_models.batch("llama", step) for step in range(3)),
        "train": train,
        "gpu": torch.cuda.is_available(),
        "lightning": importlib.util.find_spec("lightning") is not None,
        "peft": importlib.util.find_spec("peft") is not None,
    }
    yield values
    if isinstance(model := values.get("model"), torch.nn.Module):
        memascend.close(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks(page: Path, names: dict[str, Any]) -> None:
    markdown = requirements.package("sybil", "sybil.parsers.markdown")
    document = requirements.package("sybil", "sybil.document").Document.parse(
        str(page),
        markdown.CodeBlockParser(language="python", evaluator=run_python),
        markdown.CodeBlockParser(language="sh", evaluator=check_commands),
        markdown.SkipParser(),
    )
    document.namespace = names
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest:  # this block alone
            continue


def test_the_checks_look_at_something() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    assert "make demo" in readme and "make test" in readme
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    checked = [command for block in blocks for command in commands(block)]
    assert {command.split()[1] for command in checked} >= {"finetune", "plan", "bench", "format", "export", "verify"}
    assert text.count("```python") >= 12
    with pytest.raises(SystemExit):
        parser().parse_args(["finetune", "--no-such-option"])
