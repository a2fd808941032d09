"""The data of a run: documents to train on, and a part that is held out to evaluate on."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

from memascend.cli.data import Documents, TokenBlocks, Tokenizer, split
from memascend.cli.errors import note
from memascend.common.outputs import writing
from memascend.common.progress import Progress
from memascend.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from memascend.cli.settings import Settings

ROLES_SHOWN = 8


class Reader:
    """Reads and tokenises data as the settings of a run say. `close` closes the data."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, vocab_size: int, scratch: Path) -> None:
        """Put files into the directory `scratch`."""
        self._settings, self._tokenizer, self._vocab_size, self._scratch = settings, tokenizer, vocab_size, scratch
        self._open = ExitStack()

    def close(self) -> None:
        """Close all documents and blocks."""
        self._open.close()

    def documents(self, paths: Sequence[Path], weights: Sequence[float] = (), option: str = "--data") -> Documents:
        """Open the documents in files and directories, as often as `weights` say, and say which are left out.

        `option` is the name of the paths in errors.

        Raises DataError where there are none, or the tokenizer cannot read them.
        """
        settings = self._settings
        documents = Documents(
            paths,
            scratch=self._folder(),
            text_field=settings.text_field,
            as_text=settings.as_text,
            weights=weights,
            option=option,
        )
        self._open.callback(documents.close)
        for line in documents.skipped.lines() + documents.notes:
            note(line)
        if documents.blank:
            note(f"records left out, since they hold nothing to train on: {documents.blank}")
        self._check_roles(documents.roles, option)
        return documents

    def evaluated(self) -> Documents | None:
        """Open the documents in the files of --eval, or return None where it is a fraction or absent."""
        evaluation = self._settings.evaluation
        if not evaluation or isinstance(evaluation, float):
            return None
        return self.documents(evaluation, option="--eval")

    def _check_roles(self, roles: Counter[str], option: str) -> None:
        """Say which roles of conversations the chat template does not name.

        Raises DataError where there is no template, or nothing that the assistant says.
        """
        if not roles:
            return
        chat = self._tokenizer.chat
        if chat is None:
            raise DataError(
                f"{option} holds conversations, but the tokenizer in {self._settings.tokenizer_dir} has no chat "
                "template: give one that has with --tokenizer DIR, or records with prompt and completion"
            )
        if not roles["assistant"] and self._settings.loss_on == "completion":
            raise DataError(
                f"no turn of the conversations in {option} is the assistant's, and only those are trained on: the "
                f"roles are {_counted(roles, roles)}. Rename them, or give --loss-on all"
            )
        if unnamed := chat.unnamed(roles):
            note(
                f"roles that the chat template does not name: {_counted(unnamed, roles)}. It may leave their turns "
                "out, and they are not trained on as the assistant's: rename them if they should be"
            )

    def divided(
        self, documents: Documents, tokens_max: int | None, evaluated: Documents | None = None
    ) -> tuple[TokenBlocks, TokenBlocks | None]:
        """Tokenise the data to train on, from the first documents that make `tokens_max`, and the data to evaluate on.

        That is a part of `documents` where --eval is a fraction, and all that `evaluated` holds otherwise.
        """
        evaluation = self._settings.evaluation
        trained_on, held_out = None, None
        if isinstance(evaluation, float):
            trained_on, held_out = split(len(documents), evaluation)
        blocks = self._tokenised(documents, trained_on, tokens_max)
        if held_out is None and evaluated is None:
            return blocks, None
        return blocks, self._tokenised(documents if evaluated is None else evaluated, held_out, None)

    def _tokenised(self, documents: Documents, part: range | None, tokens_max: int | None) -> TokenBlocks:
        settings = self._settings
        bar = Progress("tokenising", len(documents if part is None else part), unit="document")
        try:
            blocks = TokenBlocks(
                documents,
                self._tokenizer,
                scratch=self._folder(),
                seq_len=settings.seq_len,
                seed=settings.seed,
                vocab_size=self._vocab_size,
                tokens_max=tokens_max,
                packing=settings.packing,
                boundaries=settings.has_boundaries,
                loss_on_all=settings.loss_on == "all",
                part=part,
                progress=lambda done, _total: bar.update(done),
            )
        finally:
            bar.close()
        self._open.callback(blocks.close)
        for line in blocks.notes():
            note(line)
        return blocks

    def _folder(self) -> Path:
        """Return a new directory, which nothing else writes to."""
        folder = self._scratch / f"data-{len(list(self._scratch.iterdir()))}"
        with writing(folder):
            folder.mkdir()
        return folder


def _counted(names: Iterable[str], roles: Counter[str]) -> str:
    """Return roles with the number of their turns, most of them first."""
    counted = sorted(names, key=lambda name: -roles[name])
    shown = [f"{name!r} ({roles[name]:,} turns)" for name in counted[:ROLES_SHOWN]]
    return ", ".join(shown) + ", ..." * (len(counted) > ROLES_SHOWN)
