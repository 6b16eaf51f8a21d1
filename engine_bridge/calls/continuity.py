"""Token continuity: the next prompt of a conversation begins with the very ids that the engine saw and made.

A sampler may spell a text in other tokens than the tokenizer would. Once such an answer is decoded and encoded again, its ids differ, and
every KV block behind the first difference is useless. So a conversation keeps its ids, and only what is new is encoded. The chat
template has the last word on the text: ids are kept as far as their text is a prefix of what it renders, no further.

Pure functions over a tokenizer. For a long conversation they take milliseconds: not for the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from engine_bridge.protocol.node import PromptOrigin

# The character that decoders write for bytes that are no whole character (yet). A character has four bytes at most, so as many tokens.
INCOMPLETE = "\ufffd"
MAX_TOKENS_PER_CHARACTER = 4
# How many times as many tokens the usual encoding of a text may have as the ids that spelled it: a byte that is no character is written as U+FFFD,
# which has three bytes.
MAX_SPELLING = 3
# Chosen: from the whole history, which mostly matches, down to the token. A history of n tokens that stops to match somewhere costs
# n/256 + 16 + 16 short decodes.
STEPS_TOKENS = (256, 16, 1)
# Behind an answer that was stopped: what the engine held back as the beginning of a character or of a stop text. Chosen.
UNTOLD_CHARS = 100


class TextTokenizer(Protocol):
    """The two methods of vLLM's tokenizers that are used here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of these ids."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the ids of this text."""


class Continued(Struct, frozen=True):
    """A prompt, how it was made, and how many of the history's ids it begins with."""

    token_ids: list[int]
    origin: PromptOrigin
    num_kept: int


def continue_prompt(
    history: Sequence[int], text: str, rendered: list[int], tokenizer: TextTokenizer
) -> Continued:
    """Return the prompt for `text`, as the chat template renders it now, that begins with as many ids of `history` as fit.

    rendered: the text's encoding, taken when nothing of the history fits, and when the pieces together would not decode to `text`: some tokenizers
    put a space in front of every text that they encode.
    """
    num_kept, num_chars = _longest_match(history, text, tokenizer)
    if num_kept == 0:
        return Continued(rendered, "rendered", 0)
    ids = [*history[:num_kept], *tokenizer.encode(text[num_chars:], add_special_tokens=False)]
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        return Continued(rendered, "rendered", 0)
    return Continued(ids, "kept" if num_kept == len(history) else "cut", num_kept)


def continue_between_tokens(
    history: Sequence[int], text: str, rendered: list[int], tokenizer: TextTokenizer, known: Collection[int]
) -> Continued:
    """Return the prompt as `continue_prompt` does, where a text may spell a special token without meaning it.

    There the text alone does not give its encoding. The history is kept as far as it and `rendered` have the same of the `known` tokens and the
    same texts between them; the rest is as `rendered` has it. Behind the history's last known token (an answer that was cut short)
    all ids are kept or none.
    """
    ours, theirs = _runs(history, known), _runs(rendered, known)
    num_kept = num_left_out = 0
    for (own, own_end), (new, new_end) in zip(ours, theirs, strict=False):
        is_same = own == new or _text(own, tokenizer) == _text(new, tokenizer)
        if own_end is None and (num_same := _num_same(own, new, tokenizer)):
            num_kept += len(own)
            num_left_out += num_same
        if own_end is None or own_end != new_end or not is_same:
            break
        num_kept += len(own) + 1
        num_left_out += len(new) + 1
    if num_kept == 0:
        return Continued(rendered, "rendered", 0)
    ids = [*history[:num_kept], *rendered[num_left_out:]]
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        return Continued(rendered, "rendered", 0)
    return Continued(ids, "kept" if num_kept == len(history) else "cut", num_kept)


def ends_with(text: str, answer: str) -> bool:
    """Return whether a text ends with an answer, but for characters that are not whole and a few that were not told yet."""
    told = _whole(answer)
    return told in _whole(text)[-len(told) - UNTOLD_CHARS :]


def _whole(text: str) -> str:
    return text.replace(INCOMPLETE, "").replace("\0", "")  # stored texts have the one for the other


def _runs(ids: Sequence[int], known: Collection[int]) -> Iterator[tuple[Sequence[int], int | None]]:
    """Yield the tokens up to each known token, with that token; at last the tokens behind it, with None."""
    start = 0
    for place, token_id in enumerate(ids):
        if token_id in known:
            yield ids[start:place], token_id
            start = place + 1
    yield ids[start:], None


def _num_same(own: Sequence[int], new: Sequence[int], tokenizer: TextTokenizer) -> int:
    """Return how many ids of `new` spell what all of `own` spell; 0 where none do."""
    text = _text(own, tokenizer)
    num = bisect_left(range(len(new) + 1), len(text), key=lambda num: len(_text(new[:num], tokenizer)))
    return num if _text(new[:num], tokenizer) == text else 0


def _text(ids: Sequence[int], tokenizer: TextTokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _longest_match(ids: Sequence[int], text: str, tokenizer: TextTokenizer) -> tuple[int, int]:
    """How many of `ids` spell a beginning of `text`, and how many characters that is. Never ends inside a character.

    May stop early, never late: at U+FFFD that was really written, and at the first slice where a decoder drops the first space of
    whatever it decodes.
    """
    num_ids = num_chars = 0
    for step in (len(ids), *STEPS_TOKENS):
        while num_ids < len(ids):
            num_taken, piece = _whole_characters(
                ids[num_ids : num_ids + step + MAX_TOKENS_PER_CHARACTER - 1], step, tokenizer
            )
            if piece.endswith(INCOMPLETE) or not text.startswith(piece, num_chars):
                break
            num_ids += num_taken
            num_chars += len(piece)
    return num_ids, num_chars


def _whole_characters(ids: Sequence[int], step: int, tokenizer: TextTokenizer) -> tuple[int, str]:
    """Return how many ids, `step` or a few more, end with a whole character, and their text."""
    for num_taken in range(min(step, len(ids)), len(ids) + 1):
        piece = tokenizer.decode(ids[:num_taken], skip_special_tokens=False)
        if not piece.endswith(INCOMPLETE):
            break
    return num_taken, piece
