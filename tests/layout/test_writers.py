"""Each part of a parameter's state is written by one folder (`memascend.layout.parameter_state`)."""

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import memascend
from memascend.layout.parameter_state import Binding, GradientState, OptimizerState

#: The parts that a place leads to: the class of each, and the files or the folder that write it.
CAPTURING = {f"gradients/{file}.py" for file in ("capture", "device_capture", "in_backward", "reduce")}
PARTS = {
    "gradient": (GradientState, CAPTURING),
    "states": (OptimizerState, {"optim"}),
    "binding": (Binding, {"autograd/binding.py", "session/saved_weights.py"}),
}
CHANGING = {"add", "append", "claim", "clear", "extend", "remove", "update"}


def changed(node: ast.AST) -> ast.expr | None:
    """Return the attribute that a node assigns to, or changes by a method."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        return node.func if node.func.attr == "claim" else node.func.value
    return None


def test_one_folder_writes_each_part_of_a_parameters_state() -> None:
    root = Path(memascend.__file__).parent
    names = {part: {"claim", *(field.name for field in fields(kind))} for part, (kind, _) in PARTS.items()}
    writers = defaultdict(set)
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            target = changed(node)
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
                part, file = target.value.attr, path.relative_to(root)
                if part in PARTS and target.attr in names[part]:
                    whole_folder = str(file.parent) in PARTS[part][1]
                    writers[part].add(str(file.parent if whole_folder else file))
    assert writers == {part: files for part, (_, files) in PARTS.items()}
