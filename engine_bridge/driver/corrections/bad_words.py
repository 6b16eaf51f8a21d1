"""Words that an answer may not hold, in all the forms in which a model writes them.

vLLM bans a word as it is encoded alone, and with a space in front only where that takes equally many tokens. But many vocabularies have a frequent
word as one token with its space and as several without it: then no token is banned that a model would write. Source: vLLM 0.32, `sampling_params.py`.

vLLM also writes one number into the step's logits for each word of each answer, which for some hundred words takes longer than the step itself. Here
all words that may end with an answer's next token are banned at once. Source: vLLM 0.32, `v1/sample/ops/bad_words.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

# The texts that a word may stand behind. A line's end is among them because many tokenizers put a space in front of a whole text.
_BEFORE = ("", " ", "\n")


class Forms(list[list[int]]):
    """Token ids of words that an answer may not hold.

    Attributes:
        always: the words of one token.
        behind: the longer words, by the token in front of their last one.
    """

    def __init__(self, forms: Iterable[list[int]] = ()) -> None:
        super().__init__(forms)
        self.always = [form[0] for form in self if len(form) == 1]
        self.behind: defaultdict[int, list[list[int]]] = defaultdict(list)
        for form in self:
            if len(form) > 1:
                self.behind[form[-2]].append(form)

    def banned(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens with which a word would end behind this answer."""
        ending = self.behind.get(answer[-1], []) if answer else []
        return self.always + [form[-1] for form in ending if list(answer[1 - len(form) :]) == form[:-1]]


def apply_bad_words(logits: Any, words: Mapping[int, list[list[int]]], answers: Sequence[list[int]]) -> None:
    """Ban, in the rows of these answers, the tokens that would end a word. Takes the place of vLLM's function.

    logits: shape (num_rows, vocabulary), changed in place. words: the banned words of a row, by its number. answers: each row's tokens so far.
    """
    for row, forms in words.items():
        if banned := (forms if isinstance(forms, Forms) else Forms(forms)).banned(answers[row]):
            logits[row, banned] = -math.inf


def install() -> None:
    """Make vLLM's sampler ban words in this way."""
    from engine_bridge.driver.vllm_api import sampler

    sampler.apply_bad_words = apply_bad_words


def forms_of(words: Iterable[str], tokenizer: Any) -> Forms:
    """Return the token ids of each word at the beginning of a text, behind a space and behind the end of a line.

    Capitals stay as they are given, and so does a word of blanks alone.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stem = word.lstrip() or word
        for before in _BEFORE:
            ids = tokenizer.encode(before + stem, add_special_tokens=False)
            if before == "\n":
                ids = _without(tokenizer.encode(before, add_special_tokens=False), ids)
            if ids:
                found[tuple(ids)] = None
    return Forms(list(ids) for ids in found)


def _without(first: list[int], ids: list[int]) -> list[int]:
    """Return the ids behind `first`; none where the ids begin otherwise."""
    return ids[len(first) :] if ids[: len(first)] == first else []


@contextmanager
def put_aside(params: Any) -> Iterator[list[str]]:
    """Take the bad words out of a request's settings for the length of a block, and yield them.

    vLLM would encode them on the event loop, hundreds of them one by one, and fails on a word of blanks alone.
    """
    words: list[str] = params.bad_words or []
    params.bad_words = []
    try:
        yield words
    finally:
        params.bad_words = words


async def ban_all_forms(params: Any, renderer: Any) -> None:
    """Ban a request's bad words in all their forms, beside the tokens that are banned already."""
    if params is None or not params.bad_words:
        return
    loop = asyncio.get_running_loop()
    # The renderer's own thread: see `continuing.continued`.
    forms = await loop.run_in_executor(
        renderer._executor, forms_of, params.bad_words, renderer.get_tokenizer()
    )
    params._bad_words_token_ids = Forms([*(params._bad_words_token_ids or ()), *forms])
