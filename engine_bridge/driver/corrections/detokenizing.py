"""Detokenizers that begin an answer's text where its prompt's text ends, also where a prompt ends inside a character.

vLLM's detokenizers decode an answer's tokens behind its prompt's, and give out the text beyond the prompt's text alone. A text that ends with U+FFFD
may change with the next token, so they wait for more. If a prompt has such an end (its last bytes are no whole character, or the character U+FFFD
itself), the fast detokenizer then takes all of the prompt for the answer's beginning, and the slow one loses the character that the answer completes.
Here the first text that is given out is shortened by the text that the prompt has said already. Source: vLLM 0.32, `v1/engine/detokenizer.py`;
tokenizers, `DecodeStream`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from engine_bridge.calls.continuity import INCOMPLETE, MAX_TOKENS_PER_CHARACTER
from engine_bridge.driver.vllm_api import (
    FastIncrementalDetokenizer,
    SlowIncrementalDetokenizer,
    _convert_tokens_to_string_with_added_encoders,
)

# The last tokens of a prompt that show how it ends without decoding all of it. Chosen: several characters, and special tokens behind them, which have
# no text.
END_TOKENS = 16


def beyond(prompt_texts: Sequence[str], text: str) -> str:
    """Return the part of `text`, which is a prompt's and its answer's, beyond the prompt.

    `prompt_texts` are the text of the whole prompt, and the texts of the prompt without its last tokens. Once more tokens follow, the last tokens may
    be decoded otherwise, and with them the text in front of them: as bytes, say, of which some become a character.
    """
    return text[max((_num_common(said, text) for said in prompt_texts), default=0) :]


def _num_common(first: str, second: str) -> int:
    """Return how many characters both texts begin with.

    The number is searched by halves: a prompt may have a million characters, and steps wait for this.
    """
    return bisect_left(range(len(first)), True, key=lambda at: not second.startswith(first[: at + 1]))


def _ends(ids: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the ids, and the ids without the last 1, 2, … tokens, up to the most that one character may have."""
    return [ids[: len(ids) - num] for num in range(min(MAX_TOKENS_PER_CHARACTER, len(ids)))]


class _BeyondPrompt:
    """Shortens the first text of a vLLM detokenizer by the prompt's text, if there are `_prompt_texts`."""

    _prompt_texts: Sequence[str] = ()

    def decode_next(self, next_token_id: int) -> str:
        """Return the text that an answer's next token brings, "" where more tokens are needed."""
        text: str = super().decode_next(next_token_id)
        if text and self._prompt_texts:
            text, self._prompt_texts = beyond(self._prompt_texts, text), ()
        return text


class FastDetokenizer(_BeyondPrompt, FastIncrementalDetokenizer):
    """The detokenizer for tokenizers of the `tokenizers` library."""

    def __init__(self, tokenizer: Any, request: Any) -> None:
        super().__init__(tokenizer, request)
        ids = request.prompt_token_ids or []
        end = self._text(ids[-END_TOKENS:])
        if end.endswith(INCOMPLETE) or (not end and self._text(ids).endswith(INCOMPLETE)):
            self._prompt_texts = [self._text(part) for part in _ends(ids)]

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)
        return text


class SlowDetokenizer(_BeyondPrompt, SlowIncrementalDetokenizer):
    """The detokenizer for all other tokenizers. vLLM keeps a prompt's last few tokens only, as text."""

    def __init__(self, tokenizer: Any, request: Any) -> None:
        super().__init__(tokenizer, request)
        if self.tokens and self._text(self.tokens).endswith(INCOMPLETE):
            self._prompt_texts = [self._text(part) for part in _ends(self.tokens)]
            self.prefix_offset = self.read_offset = 0  # so that the first text holds these tokens, too

    def _text(self, tokens: Sequence[str]) -> str:
        text: str
        if self.tokenizer.is_fast or not self.tokenizer.get_added_vocab():
            text = self.tokenizer.convert_tokens_to_string(list(tokens))
        else:
            text = _convert_tokens_to_string_with_added_encoders(
                self.tokenizer, list(tokens), self.skip_special_tokens, self.spaces_between_special_tokens
            )
        return text


def install() -> None:
    """Make vLLM use these detokenizers for every request."""
    from engine_bridge.driver.vllm_api import detokenizer

    detokenizer.FastIncrementalDetokenizer = FastDetokenizer
    detokenizer.SlowIncrementalDetokenizer = SlowDetokenizer
