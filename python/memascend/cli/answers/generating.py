"""Answers to prompts, several at once: one reading of the weights gives each of them its next token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import CheckpointError
from memascend.formats.config import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(slots=True)
class Sampling:
    """How tokens are chosen, and where an answer ends."""

    new_tokens: int
    #: 0 takes the most likely token; None chooses as the model's defaults say.
    temperature: float | None = None
    #: Tokens that end an answer, beside the model's defaults.
    ends: Sequence[int] = ()
    #: Called with the next token of each sequence, as it is chosen.
    told: Callable[[Sequence[int]], None] | None = None
    #: Whether the answers are to end where they are.
    stopped: Callable[[], bool] = field(default=lambda: False)

    def answers(self, model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens that follow each of `prompts`, without the ones that end them.

        Shorter prompts are padded on the left, which may change the last bits of a sum: of two tokens that are equally
        likely to that accuracy, another may be chosen than for the prompt alone.
        """
        ends = self._ends(model)
        vocabulary, _ = limits(model.config)
        padding = next((token for token in ends if 0 <= token < vocabulary), 0)
        length = max(map(len, prompts))
        ids = torch.full((len(prompts), length), padding)  # (sequences, tokens)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            mask[row, length - len(prompt) :] = 1
        with torch.no_grad():
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.new_tokens,
                pad_token_id=padding,
                eos_token_id=ends or None,
                stopping_criteria=[self._stop],
                logits_processor=[_numbers],
                use_cache=True,
                **self._choice(),
            )
        return [_before(ends, answer) for answer in found[:, length:].tolist()]

    def _choice(self) -> dict[str, Any]:
        if self.temperature is None:
            return {}
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature}

    def _ends(self, model: Any) -> list[int]:
        named = model.generation_config.eos_token_id
        own = named if isinstance(named, list) else [] if named is None else [named]
        return list(dict.fromkeys([*own, *self.ends]))

    def _stop(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if self.told is not None:
            self.told(ids[:, -1].tolist())
        return torch.full((len(ids),), self.stopped())


def _numbers(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return the scores of the next tokens.

    Raises CheckpointError where they are no numbers, of which any token would be chosen.
    """
    if bool(scores.isnan().any()):
        raise CheckpointError(
            "the model gives no numbers for the next token (NaN): its weights are damaged, or its training went wrong"
        )
    return scores


def _before(ends: Sequence[int], answer: list[int]) -> list[int]:
    return answer[: next((index for index, token in enumerate(answer) if token in ends), len(answer))]
