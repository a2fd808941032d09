"""Text in, batches out: files, source trees and JSONL become fixed-length blocks of token ids.

Host memory does not grow with the corpus. Documents are indexed into a file, read in a seeded order,
tokenised piece by piece into a second file, and batches are read from there. Orders are computed, not stored.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import os
import stat
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from memascend.common.outputs import writing
from memascend.errors import CheckpointError, DataError, OutputError, first_line
from memascend.formats.side_files import has_tokenizer
from memascend.formats.transformers_models import explained_code

PIECE_BYTES = 64 << 10  # a tokenizer takes some hundred bytes per token while it works, so it gets small pieces
SNIFF_BYTES = 8 << 10
TOKEN_BYTES = 4
END_OF_DOCUMENT, PADDING = 256, 257  # the ids after the 256 bytes, in a byte-level vocabulary
BYTE_VOCABULARY = 258


class Tokenizer(Protocol):
    """What training needs of a tokenizer: text to ids, ids to text, and the id between two documents."""

    end_of_document: int | None

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a piece of text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


class ByteTokenizer:
    """One token per UTF-8 byte, for a model that brings no tokenizer."""

    end_of_document: int | None = END_OF_DOCUMENT

    def encode(self, text: str) -> Sequence[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids that are bytes; others are dropped."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face model directory."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer that transformers loaded."""
        self._tokenizer = tokenizer
        separator = tokenizer.eos_token_id
        self.end_of_document: int | None = separator if separator is not None else tokenizer.sep_token_id

    def encode(self, text: str) -> Sequence[int]:
        """Token ids without special tokens."""
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(model_dir: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in `model_dir`, or one token per byte where it has none."""
    if not has_tokenizer(model_dir):
        if vocab_size < BYTE_VOCABULARY:
            raise CheckpointError(
                f"{model_dir} has no tokenizer, and its vocabulary of {vocab_size} is too small for bytes "
                f"(needs {BYTE_VOCABULARY}): put the model's tokenizer files beside config.json"
            )
        return ByteTokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a broken tokenizer.json
        raise CheckpointError(
            explained_code(error, f"the tokenizer in {model_dir}")
            or f"{model_dir}: its tokenizer cannot be loaded: {first_line(error)}"
        ) from error
    return HuggingFaceTokenizer(tokenizer)


def shuffled(index: int, count: int, key: str) -> int:
    """Where `index` goes in the permutation of range(count) that `key` picks, by a Feistel network."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:  # walk the cycle until it is back inside the range; at most 4 tries on average
        left, right = index >> half_bits, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < count:
            return index


class Documents:
    """An index, on disk, of the documents under some paths: where each one's text is, in which file."""

    _RECORD = struct.Struct("<QIBQQ")  # path offset, path length, is JSONL, text offset, text length

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, scratch: Path, text_field: str = "text") -> None:
        """Walk `paths` and check that they hold text; `scratch` is an existing directory for the index."""
        self.text_field = text_field
        self.skipped_files = 0
        self._last: tuple[bytes, int] = (b"", 0)
        self._names_bytes = 0
        self._scratch = scratch
        with writing(scratch):
            self._names = open(scratch / "names", "wb+")  # noqa: SIM115 (closed by close)
            self._records = open(scratch / "documents", "wb+")  # noqa: SIM115
        self._count = 0
        try:
            for path in paths:
                self._add(Path(path))
            if not self._count:
                where = ", ".join(str(p) for p in paths)
                raise DataError(f"no text in {where}: give text files, directories of them, or .jsonl files")
            with writing(scratch):
                self._names.flush()
                self._records.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the index files."""
        _close(self._names)
        _close(self._records)

    def __len__(self) -> int:
        return self._count

    def text(self, index: int) -> Iterator[str]:
        """The text of one document, in pieces."""
        raw = os.pread(self._records.fileno(), self._RECORD.size, index * self._RECORD.size)
        name_at, name_bytes, is_jsonl, offset, length = self._RECORD.unpack(raw)
        path = os.fsdecode(os.pread(self._names.fileno(), name_bytes, name_at))
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                if is_jsonl:
                    text = json.loads(file.read(length))[self.text_field]
                    yield from _decoded_pieces(io.BytesIO(text.encode(errors="replace")))  # JSON may hold half a pair
                else:
                    yield from _decoded_pieces(file)
        except (KeyError, ValueError, RecursionError) as error:  # it was checked when it was indexed
            raise DataError(f"{path} changed while it was being read") from error

    def _add(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise DataError(f"--data {path}: {error.strerror}") from error
        if stat.S_ISREG(mode):
            self._add_file(path, named=True)
        elif stat.S_ISDIR(mode):
            for folder, folders, files in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(files):
                    file = Path(folder, name)
                    if not name.startswith(".") and file.is_file():
                        self._add_file(file, named=False)
        else:
            raise DataError(f"--data {path} is neither a file nor a directory")

    def _add_file(self, path: Path, *, named: bool) -> None:
        """Index one file. A file that the user named must hold text; a file of a directory need not."""
        try:
            if path.suffix == ".jsonl":
                self._add_jsonl(path, named=named)
            else:
                self._add_text(path)
        except OutputError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            if named:
                raise DataError(f"{path} is not UTF-8 text (byte {error.start} of a piece: {error.reason})") from error
            self.skipped_files += 1

    def _add_text(self, path: Path) -> None:
        with open(path, "rb") as file:
            if b"\0" in file.read(SNIFF_BYTES):
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "it holds a zero byte, so it is taken for binary")
            file.seek(0)
            has_text = False
            for piece in _decoded_pieces(file):
                has_text = has_text or not piece.isspace()
            if has_text:
                self._append(path, is_jsonl=False, offset=0, length=file.tell())

    def _add_jsonl(self, path: Path, *, named: bool) -> None:
        with open(path, "rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    text = self._field(path, number, line, named=named or offset > 0)
                    if text is None:
                        self.skipped_files += 1
                        return
                    if text.strip():
                        self._append(path, is_jsonl=True, offset=offset, length=len(line))
                offset += len(line)

    def _field(self, path: Path, number: int, line: bytes, *, named: bool) -> str | None:
        """The text of one JSONL line; None where a file that the user did not name is of another kind."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter for what is nested too deeply
            if not named:
                return None
            raise DataError(f"{path}, line {number} is not JSON: {first_line(error)}") from error
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if isinstance(text, str):
            return text
        if not named:
            return None
        raise DataError(f"{path}, line {number} has no text in field {self.text_field!r}: name it with --text-field")

    def _append(self, path: Path, *, is_jsonl: bool, offset: int, length: int) -> None:
        name = os.fsencode(path)
        with writing(self._scratch):
            if name != self._last[0]:
                self._last = (name, self._names_bytes)
                self._names.write(name)
                self._names_bytes += len(name)
            self._records.write(self._RECORD.pack(self._last[1], len(name), is_jsonl, offset, length))
        self._count += 1


class Blocks:
    """Documents in a seeded order, end to end, cut into blocks of `seq_len` tokens on disk."""

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        scratch: Path,
        seq_len: int,
        seed: int,
        vocab_size: int,
        tokens_max: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Tokenise into a file in `scratch` until `tokens_max`; `progress` gets (documents done, of all)."""
        self.seq_len = seq_len
        self._seed = seed
        self.tokens = 0
        self._scratch = scratch
        with writing(scratch):
            self._file = open(scratch / "tokens", "wb+")  # noqa: SIM115 (closed by close)
        try:
            for position in range(len(documents)):
                if tokens_max is not None and self.tokens >= tokens_max:
                    break
                for piece in documents.text(shuffled(position, len(documents), f"{seed}/documents")):
                    self._write(tokenizer.encode(piece), vocab_size)
                if tokenizer.end_of_document is not None:
                    self._write([tokenizer.end_of_document], vocab_size)
                if progress is not None:
                    progress(position + 1, len(documents))
            with writing(scratch):
                self._file.flush()
        except BaseException:
            self.close()
            raise
        self._count = self.tokens // seq_len
        if not self._count:
            self.close()
            raise DataError(
                f"the data has {self.tokens} tokens, fewer than one sequence of {seq_len}: "
                "give more data or lower --seq-len"
            )

    def close(self) -> None:
        """Close the token file."""
        _close(self._file)

    def __len__(self) -> int:
        return self._count

    def block(self, index: int) -> torch.Tensor:
        """Block `index` in stored order: shape (seq_len,), int64."""
        size = self.seq_len * TOKEN_BYTES
        raw = os.pread(self._file.fileno(), size, index * size)
        return torch.frombuffer(bytearray(raw), dtype=torch.int32).long()

    def batch(self, index: int, batch_size: int) -> dict[str, torch.Tensor]:
        """Batch `index` of endless epochs, each in its own order: ids and labels, (batch_size, seq_len)."""
        rows = []
        for position in range(index * batch_size, (index + 1) * batch_size):
            epoch, place = divmod(position, self._count)
            rows.append(self.block(shuffled(place, self._count, f"{self._seed}/epoch {epoch}")))
        input_ids = torch.stack(rows)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def _write(self, ids: Sequence[int], vocab_size: int) -> None:
        if not len(ids):
            return
        if max(ids) >= vocab_size:
            raise CheckpointError(
                f"the tokenizer gives token {max(ids)}, but the model's vocabulary ends at {vocab_size - 1}: "
                "the tokenizer in MODEL_DIR belongs to another model"
            )
        with writing(self._scratch):
            self._file.write(array("i", ids))
        self.tokens += len(ids)


def _decoded_pieces(file: Any) -> Iterator[str]:
    """The rest of a binary file as text, in pieces that end at a line where one is near."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = ""
    while raw := file.read(PIECE_BYTES):
        held += decoder.decode(raw)
        cut = held.rfind("\n") + 1
        if not cut and len(held) >= PIECE_BYTES:  # one very long line: cut it anywhere
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    held += decoder.decode(b"", final=True)
    if held:
        yield held


def _close(file: Any) -> None:
    """Close a scratch file. A failed write was reported before, and closing would only try it again."""
    with contextlib.suppress(OSError):
        file.close()
