"""Words that an answer may not hold, in all the forms in which a model writes them.

vLLM bans a word as it is encoded alone, and with a space in front only where that takes as many tokens. But many vocabularies have a frequent word as
one token with its space and as several without it: then nothing is banned that a model would write. Source: vLLM 0.32, `sampling_params.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

# What a word may stand behind. Of a line's end, because many tokenizers put a space of their own in front of a whole text.
_BEFORE = ("", " ", "\n")


def forms_of(words: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of each word at the beginning of a text, behind a space and behind the end of a line. Capitals stay as they are given."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for before in _BEFORE:
            ids = tokenizer.encode(before + word.lstrip(), add_special_tokens=False)
            if before == "\n":
                ids = _without(tokenizer.encode(before, add_special_tokens=False), ids)
            if ids:
                found[tuple(ids)] = None
    return [list(ids) for ids in found]


def _without(first: list[int], ids: list[int]) -> list[int]:
    """What follows `first`; nothing where the ids begin otherwise."""
    return ids[len(first) :] if ids[: len(first)] == first else []


async def ban_all_forms(params: Any, renderer: Any) -> None:
    """Complete what vLLM has noted of a request's bad words."""
    if params is None or not params.bad_words:
        return
    loop = asyncio.get_running_loop()
    # The renderer's own thread: see `continuing.continued`.
    forms = await loop.run_in_executor(
        renderer._executor, forms_of, params.bad_words, renderer.get_tokenizer()
    )
    params._bad_words_token_ids = forms
