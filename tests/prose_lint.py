"""Count words that make comments and docstrings hard to read, folder by folder: `make lint` runs this.

Each folder has, in 10,000 words of comments and docstrings, `what` at most 10 times and `those of`, `that of` or `of
which` at most twice, and the docstring of each Python function begins with an imperative.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
#: Most of each in 10,000 words.
LIMITS = {"what": 10.0, "those/that of, of which": 2.0}
TICS = {"what": r"\bwhat\b", "those/that of, of which": r"\b(?:those|that) of\b|\bof which\b"}
#: In a folder with few words, one is not too many.
ALWAYS_ALLOWED = 1
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"`[^`]*`")
_RUST_COMMENT = re.compile(r"^\s*//[/!]?(.*)$|\s//\s(.*)$")
#: First words of a function's docstring that are no imperative, beside verbs that end in "s".
_NO_VERBS = {
    "a",
    "all",
    "an",
    "any",
    "as",
    "each",
    "every",
    "for",
    "from",
    "how",
    "if",
    "in",
    "it",
    "its",
    "no",
    "none",
}
_NO_VERBS |= {"one", "only", "that", "the", "these", "this", "those", "to", "what", "when", "where", "whether", "which"}
_NO_VERBS |= {"who", "why", "with"}
_VERBS_IN_S = {"access", "address", "bypass", "compress", "cross", "discuss", "dismiss", "express", "pass", "process"}


def folders() -> dict[str, list[Path]]:
    """Return the source files of each folder that is counted by itself."""
    found: dict[str, list[Path]] = {}
    for crate in sorted((ROOT / "crates").iterdir()):
        found[f"crates/{crate.name}"] = sorted(crate.rglob("*.rs"))
    package = ROOT / "python" / "memascend"
    for folder in sorted(path.parent for path in package.glob("*/__init__.py")):
        sources = [path for ending in ("py", "cu") for path in folder.rglob(f"*.{ending}")]
        found[f"python/memascend/{folder.name}"] = sorted(sources)
    found["python/memascend"] = sorted([*package.glob("*.py"), *package.glob("*.pyi")])
    for name in ("benches", "examples"):
        found[name] = sorted((ROOT / name).rglob("*.py"))
    tests = ROOT / "tests"
    for folder in sorted(path for path in tests.iterdir() if path.is_dir() and any(path.rglob("*.py"))):
        found[f"tests/{folder.name}"] = sorted(folder.rglob("*.py"))
    found["tests"] = sorted(tests.glob("*.py"))
    return {name: paths for name, paths in found.items() if paths}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a source file, each with its first line's number."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        for number, comment in comments(text):
            yield number, comment.lstrip("#: ")
        for node, docstring in docstrings(text):
            yield node.lineno, docstring
        return
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _RUST_COMMENT.search(line)) and "SAFETY:" not in line:
            yield number, match[1] or match[2] or ""


@lru_cache(maxsize=1)
def _nodes(text: str) -> list[ast.AST]:
    """Return the nodes of a Python source; the last one is asked for several times."""
    return list(ast.walk(ast.parse(text)))


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments in a Python source, each with its line's number."""
    strings = defaultdict[int, list[tuple[int, int]]](list)
    long = []
    for node in _nodes(text):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)):
            if node.lineno == node.end_lineno:
                strings[node.lineno].append((node.col_offset, node.end_col_offset or 0))
            else:
                long.append(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = text.split("\n")
    signs = {number for number, line in enumerate(lines, 1) if "#" in line}
    if any(number in signs for lines_of in long for number in lines_of):
        # A docstring with such a sign, or a comment between parts of a string: the slow way tells which.
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
        return
    for number in sorted(signs):
        line = lines[number - 1].encode()
        at = line.find(b"#")
        while any(first <= at < end for first, end in strings[number]):
            at = line.find(b"#", at + 1)
        if at >= 0:
            yield number, line[at:].decode()


def docstrings(text: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the docstrings in a Python source, each with the node of the string."""
    for node in _nodes(text):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if docstring := ast.get_docstring(node):
            yield node.body[0], docstring


def without_imperative(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the functions whose docstring begins without an imperative: the line's number, and the first line.

    Properties and fixtures are named like values, and tests by sentences.
    """
    if path.suffix != ".py":
        return
    for node in _nodes(path.read_text()):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("test_"):
            continue
        docstring = ast.get_docstring(node)
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if docstring and "property" not in decorators and "fixture" not in decorators and not is_imperative(docstring):
            yield node.body[0].lineno, docstring.splitlines()[0]


def is_imperative(docstring: str) -> bool:
    """Return whether a docstring may begin with an imperative, as far as its first word tells."""
    match = _WORD.match(docstring)
    if match is None:
        return False
    word = match[0].lower()
    return word not in _NO_VERBS and (not word.endswith("s") or word in _VERBS_IN_S)


def counted(paths: list[Path]) -> tuple[int, Counter[str], list[str]]:
    """Return the number of words of prose in some files, the tics among them, and a line for each place."""
    words, tics, places = 0, Counter[str](), []
    for path in paths:
        name = path.relative_to(ROOT)
        for number, text in prose_of(path):
            words += len(_WORD.findall(text))
            plain = _CODE.sub("", " ".join(text.split()))
            for tic, pattern in TICS.items():
                if times := len(re.findall(pattern, plain, re.IGNORECASE)):
                    tics[tic] += times
                    places.append(f"{name}:{number}: {tic}: {plain[:100]}")
        for number, line in without_imperative(path):
            tics["no imperative"] += 1
            places.append(f"{name}:{number}: no imperative: {line[:100]}")
    return words, tics, places


def excesses(words: int, tics: Counter[str]) -> list[str]:
    """Return the limits that a folder of so many words is above."""
    above = [tic for tic, limit in LIMITS.items() if tics[tic] > max(ALWAYS_ALLOWED, limit * words / 10_000)]
    return above + (["no imperative"] if tics["no imperative"] else [])


def main() -> int:
    """Print the counts; 1 where a folder is above the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="show each place in these folders")
    chosen = parser.parse_args().folders
    failed = []
    known = folders()
    if unknown := sorted({*chosen} - known.keys()):
        parser.error(f"no such folder: {', '.join(unknown)}")
    for name, paths in known.items():
        words, tics, places = counted(paths)
        above = excesses(words, tics)
        failed += [name] * bool(above)
        if name in chosen or above:
            print("\n".join(places))
        mark = "FAILS" if above else "holds"
        rates = "  ".join(f"{tic} {tics[tic] * 10_000 / max(words, 1):5.1f}" for tic in TICS)
        print(f"{name:34} {words:6} words  {rates}  no imperative {tics['no imperative']:3}  {mark}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
