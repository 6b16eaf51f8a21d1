"""vLLM's renderer for servers on which the text of messages stays text (`--special-tokens-in-content split`).

See `engine_bridge.calls.plain_content`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from engine_bridge.calls.plain_content import KnownToken, Marks
from engine_bridge.driver.vllm_api.features import PLAIN_CONTENT
from engine_bridge.driver.vllm_api.start import Off
from engine_bridge.protocol.errors import NotSupported, SeamMoved


class ContentTokens:
    """Reads rendered text in which a client's text spells a token of the tokenizer's.

    Args:
        backend: the fast form of a Hugging Face tokenizer. Reading a large one takes about a second.

    Raises:
        NotSupported: for a tokenizer without a fast form.
    """

    def __init__(self, backend: Any) -> None:
        if backend is None:
            raise NotSupported(
                "special_tokens_in_content: this model's tokenizer has no fast form (tokenizer.json), with which alone contents can be split"
            )
        definition = json.loads(backend.to_str())
        added = definition["added_tokens"]
        self.marks = Marks([KnownToken(token["content"], token["special"]) for token in added])
        for token in added:
            token["content"] = self.marks.aliases[token["content"]]
        definition["padding"] = definition["truncation"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(definition))
        # The tokens have new numbers, behind those of the model's own vocabulary, since their names are new.
        self._num_plain = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self._real = {self._tokenizer.token_to_id(token["content"]): token["id"] for token in added}
        self.ids = frozenset(self._real.values())
        """The ids of all tokens that are found as a whole: the tokens that end and begin messages are among them."""
        self._before, self._after = _around(backend)

    def ids_of(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a rendered text with marks."""
        text = self.marks.with_aliases(text)
        found = self._encode(self.marks.without(text))
        if any(number in self.ids and number < self._num_plain for number in found):
            # The vocabulary itself has the token's text as a word (Unigram): between the marks there is no whole one.
            found = [number for piece in self.marks.pieces(text) for number in self._encode(piece)]
        ids = [self._real.get(number, number) for number in found]
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _around(backend: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and behind a text that is read with special tokens."""
    plain, whole = (backend.encode("a", add_special_tokens=is_whole).ids for is_whole in (False, True))
    start = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]


def split_contents(renderer: Any, off: Off) -> frozenset[int]:
    """Make a vLLM renderer keep messages' text as text. Returns the ids of all tokens that are found as a whole.

    Raises:
        NotSupported: for a tokenizer without a fast form.
        SeamMoved: where vLLM's internals have moved.
    """
    if PLAIN_CONTENT in off:
        raise SeamMoved(f"vLLM has moved: {PLAIN_CONTENT.without}")
    tokens = ContentTokens(getattr(renderer.get_tokenizer(), "backend_tokenizer", None))
    marks = tokens.marks
    render, tokenize = renderer.render_messages_async, renderer.tokenize_prompts_async

    async def in_thread(work: Any, *args: Any) -> Any:
        """Run work on the renderer's thread."""
        return await asyncio.get_running_loop().run_in_executor(renderer._executor, work, *args)

    async def render_messages(messages: Any, params: Any) -> Any:
        """Render messages whose texts are marked where they spell a token."""
        (marked, has_marks), (options, has_more) = await in_thread(
            lambda: (marks.messages(messages), marks.value(params.chat_template_kwargs))
        )
        if not has_marks and not has_more:
            return await render(marked, params)
        conversation, prompt = await render(marked, replace(params, chat_template_kwargs=options))
        return marks.without(conversation), prompt

    def plain(prompt: Any, params: Any) -> Any:
        """Return a prompt with its token ids and without marks."""
        text = prompt["prompt"]
        params.apply_pre_tokenization(
            renderer.get_tokenizer(), {"prompt": marks.without(text)}
        )  # raises for a text that is too long
        add_special_tokens = params.get_encode_kwargs().get("add_special_tokens", True)
        ids = tokens.ids_of(text, add_special_tokens=add_special_tokens)
        return {**prompt, "prompt": marks.without(text), "prompt_token_ids": ids}

    async def tokenize_prompts(prompts: Any, params: Any) -> Any:
        """Tokenize prompts; those with marks are tokenized here."""
        ready = []
        for prompt in prompts:
            text = prompt.get("prompt") if "prompt_token_ids" not in prompt else None
            is_marked = isinstance(text, str) and marks.are_in(text)
            ready.append(await in_thread(plain, prompt, params) if is_marked else prompt)
        return await tokenize(ready, params)

    renderer.render_messages_async, renderer.tokenize_prompts_async = render_messages, tokenize_prompts
    return tokens.ids
