"""Which versions of DeepSpeed this was made for, and whether the code that it takes the place of is as it was."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

#: The first version of DeepSpeed whose operators are replaced, and the first that is not supported.
FIRST_VERSION, END_VERSION = "0.18.0", "0.20"

#: The versions whose swappers, gradients and step are replaced too.
KNOWN_VERSIONS = "0.19.5 to 0.19.8"

#: Of each method or class that is replaced or derived from: the digests of its source in those versions.
KNOWN: dict[str, set[str]] = {
    "load_checkpoint": {"b06341e8eb59be93"},
    "_setup_for_real_optimizer": {"6c8852daaf78362f"},
    "partition_grads": {"3ca6b17c5709c583"},
    "_constant_buffered_norm2": {"6feb2ed6e42555fd", "42bbd11ec3514ee6"},
    "has_overflow": {"2e6191c164ec2f5a"},
    "_create_param_groups_fp16_flat_cpu_memory": {"852cda362c2d5080"},
    "initialize_optimizer_states": {"055673a537e1e98f"},
    "_offload_grad_partition_at_boundary": {"f03c6a33201a054c"},
    "step": {"1dfecf4f2fb70970", "23fefdf5579576c9"},
    "_prepare_sub_group": {"ca57568ad86bd254"},
    "unscale_and_clip_grads": {"f91e4807114004ae"},
    "_optimizer_step": {"fa43626f0a6e5c54", "bae91b5835b52878"},
    "_reassign_or_swap_out_partitioned_parameters": {"0caffa936674edf2"},
    "_release_sub_group": {"31475e7f11762f3e"},
    "_post_step": {"feaee230b6a1ce67"},
    "checkpoint_event_prologue": {"d32f3d66bf433689"},
    "reset_swap_buffers": {"3db4f3fc93453af5"},
    "AsyncPartitionedParameterSwapper": {"7b00be971f896b15"},
    "SwapBufferManager": {"f67f41c87631a621"},
    "OptimizerSwapper": {"4fff3a5e262122da", "ec71630359faa68b"},
    "PartitionedOptimizerSwapper": {"a593fcebdb2a4c04", "116bbea96764fb09"},
}


def is_supported(version: str) -> bool:
    """Return whether a version is one of those."""
    from packaging.version import Version

    return Version(FIRST_VERSION) <= Version(Version(version).base_version) < Version(END_VERSION)


def unknown(module: ModuleType, cls: str, methods: Sequence[str] | None = None) -> list[str]:
    """Return those methods of a class of `module` that are missing, or whose source is not known.

    Without `methods` the class as a whole is looked at.
    """
    lines = inspect.getsource(module).splitlines(keepends=True)
    nodes = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.ClassDef) and node.name == cls]
    children = [child for node in nodes for child in node.body if isinstance(child, ast.FunctionDef)]
    found = {node.name: node for node in (nodes if methods is None else children)}
    names = [cls] if methods is None else methods
    return [name for name in names if name not in found or _digest(found[name], lines) not in KNOWN.get(name, ())]


def _digest(node: ast.ClassDef | ast.FunctionDef, lines: list[str]) -> str:
    """Return the digest of the source of a class or function with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    source = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    return hashlib.sha256(source.encode()).hexdigest()[:16]
