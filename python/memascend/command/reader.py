"""The data of a run: what is trained on, and what is held out of that to evaluate on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from memascend.command.data import Blocks, Documents, Tokenizer, split
from memascend.command.exits import note
from memascend.common.outputs import writing
from memascend.common.progress import Progress
from memascend.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memascend.command.settings import Settings


class Reader:
    """Reads and tokenises data as the settings of a run say. `close` closes what was read."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, vocab_size: int, scratch: Path) -> None:
        """Put files into the directory `scratch`."""
        self._settings, self._tokenizer, self._vocab_size, self._scratch = settings, tokenizer, vocab_size, scratch
        self._open = ExitStack()

    def close(self) -> None:
        """Close all documents and blocks."""
        self._open.close()

    def documents(self, paths: Sequence[Path]) -> Documents:
        """Open the documents in files and directories, and say what is left out.

        Raises DataError where there are none, or the tokenizer cannot read them.
        """
        documents = Documents(paths, scratch=self._folder(), text_field=self._settings.text_field)
        self._open.callback(documents.close)
        for line in documents.skipped.lines() + documents.notes:
            note(line)
        if documents.has_chats and self._tokenizer.chat is None:
            raise DataError(
                f"--data holds conversations, but the tokenizer in {self._settings.model_dir} has no chat template"
            )
        return documents

    def divided(self, documents: Documents, tokens_max: int | None) -> tuple[Blocks, Blocks | None]:
        """Tokenise what is trained on, from the first documents that make `tokens_max`, and what is evaluated on."""
        evaluation = self._settings.evaluation
        trained_on, held_out = None, None
        if isinstance(evaluation, float):
            trained_on, held_out = split(len(documents), evaluation)
        blocks = self._tokenised(documents, trained_on, tokens_max)
        if not evaluation:
            return blocks, None
        if not isinstance(evaluation, float):
            documents = self.documents(evaluation)
        return blocks, self._tokenised(documents, held_out, None)

    def _tokenised(self, documents: Documents, part: range | None, tokens_max: int | None) -> Blocks:
        settings = self._settings
        bar = Progress("tokenising", len(documents if part is None else part), unit="document")
        try:
            blocks = Blocks(
                documents,
                self._tokenizer,
                scratch=self._folder(),
                seq_len=settings.seq_len,
                seed=settings.seed,
                vocab_size=self._vocab_size,
                tokens_max=tokens_max,
                packing=settings.packing,
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
