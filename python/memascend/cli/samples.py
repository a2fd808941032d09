"""`--sample PROMPT`: answers of the model before and after the training, on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.cli.answers.generating import Sampling
from memascend.cli.answers.texts import Texts
from memascend.cli.data import ByteTokenizer
from memascend.errors import CheckpointError
from memascend.formats.config import limits

if TYPE_CHECKING:
    from memascend.cli.data import Tokenizer
    from memascend.cli.settings import Settings

#: Tokens of an answer: for each of them a model that does not fit is read once.
TOKENS = 48


class Samples:
    """Prints the most likely answer to a prompt; of a run that goes on, only the one after it."""

    def __init__(self, prompt: str, settings: Settings) -> None:
        """Take a user's turn, or where the model has no chat template a text to continue."""
        self._prompt, self._settings = prompt, settings

    def __call__(self, when: str, model: Any, tokenizer: Tokenizer) -> None:
        """Answer, and leave the model in the mode that it was in."""
        if when == "before" and self._settings.resume:
            return
        directory = None if isinstance(tokenizer, ByteTokenizer) else self._settings.tokenizer_dir
        texts = Texts(directory, limits(model.config)[0])
        ids = texts.ids([{"role": "user", "content": self._prompt}] if texts.chats else self._prompt)
        was_training = model.training
        model.eval()
        try:
            (answer,) = Sampling(TOKENS, temperature=0, ends=texts.ends).answers(model, [ids])
            shown = texts.text(answer).strip() or "(nothing)"
        except CheckpointError as error:  # The model is written all the same.
            shown = f"({error})"
        finally:
            model.train(was_training)
        print("\n".join([f"sample {when} the training:", *(f"  | {line}" for line in shown.splitlines())]), flush=True)
