"""What a GPU's sampler has room for in one request's settings. Pure.

vLLM's newer model runner keeps them in tables of fixed width. A request that goes beyond fails the step in which it begins, and with it all answers.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from engine_bridge.policy.limits.request_limits import KIB
from engine_bridge.protocol.errors import InvalidRequest

# On a GPU, the most forms of all bad words of a request, a word having up to three, and the most tokens of these. Chosen: room for the usual limit of
# 256 words. vLLM's own are an eighth of that; both tables take 37 MB of the device for 1,024 requests.
GPU_BAD_WORDS, GPU_BAD_WORD_TOKENS = KIB, 8 * KIB


class SamplerRoom(Struct, frozen=True, kw_only=True):
    """The widths of a sampler's tables.

    Attributes:
        stop_tokens: of the tokens that may not end an answer before `min_tokens`.
        bad_words: of the bad words, in all their forms; bad_word_tokens: of the tokens of these together.
    """

    allowed_tokens: int
    biased_tokens: int
    stop_tokens: int
    bad_words: int
    bad_word_tokens: int


def check_room(params: Any, room: SamplerRoom) -> None:
    """Check that a request's settings (vLLM's `SamplingParams`, with its bad words as tokens) have room. Raises InvalidRequest."""
    words = params.bad_words_token_ids or ()
    ends = params.all_stop_token_ids if params.min_tokens > 0 else ()
    for name, given, most, what in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), room.allowed_tokens, "tokens"),
        ("logit_bias", len(params.logit_bias or ()), room.biased_tokens, "tokens"),
        ("stop_token_ids", len(ends), room.stop_tokens, "tokens beside min_tokens, with the model's own"),
        ("bad_words", len(words), room.bad_words, "forms of words"),
        ("bad_words", sum(map(len, words)), room.bad_word_tokens, "tokens in all forms of the words"),
    ):
        if given > most:
            raise InvalidRequest(f"{name}: {given:,} {what}; this device takes at most {most:,}.", param=name)
