"""`--options FILE`: options of a run in a YAML or JSON file, as words of the command line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from memascend.common.choices import meant
from memascend.errors import DataError, first_line

_FLAG = "--options"
#: Of these, one on the command line stands for all.
_EXCLUSIVE = {"--steps", "--epochs"}


def with_options(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the words of a command, with the options of its file that the command does not have itself.

    `flags` are those that the command has. Raises DataError for a file that cannot be read, or holds something else.
    """
    words = list(words)
    path = _named(words)
    if path is None:
        return words
    given = {word.split("=", 1)[0] for word in words if word.startswith("--")}
    if given & _EXCLUSIVE:
        given |= _EXCLUSIVE
    for name, value in _read(path).items():
        flag = "--" + str(name).replace("_", "-")
        if flag not in flags and flag != "--model":
            raise DataError(f"--options {path}: there is no option {name!r}{meant(flag, flags)}")
        if flag == _FLAG:
            raise DataError(f"{path} names another file of options: one is read")
        if flag == "--model" and words[1].startswith("-"):
            words.insert(1, str(value))
        elif flag != "--model" and flag not in given:
            words += _words_of(path, flag, value)
    return words


def _named(words: list[str]) -> Path | None:
    """Return the file that the words name."""
    for index, word in enumerate(words):
        if word == _FLAG and index + 1 < len(words):
            return Path(words[index + 1])
        if word.startswith(_FLAG + "="):
            return Path(word.removeprefix(_FLAG + "="))
    return None


def _read(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"--options {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"--options {path} is neither YAML nor JSON: {first_line(error)}") from error
    if not isinstance(options, dict):
        raise DataError(f"--options {path} holds no options: write lines such as `steps: 100`")
    return options


def _words_of(path: Path, flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, dict):
        raise DataError(f"--options {path}: {flag[2:]} holds options of its own; write it as one value or a list")
    values = value if isinstance(value, list) else [value]
    if flag == "--store":  # the one option that is given several times for several values
        return [word for one in values for word in (flag, str(one))]
    return [flag, *map(str, values)]
