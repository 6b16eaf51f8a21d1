"""Prompts that begin with the token ids that their session has: for turns of the chat socket and for calls of the APIs alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engine_bridge.calls.continuity import Continued, continue_between_tokens, continue_prompt, ends_with
from engine_bridge.protocol.node import unpack_token_ids


class Continuing:
    """Makes prompts begin with the token ids that their session has.

    Args:
        renderer: vLLM's, whose tokenizer is used.

    Attributes:
        known: all tokens that the tokenizer finds as a whole, where a text may spell a token without meaning it; empty where it may not.
    """

    def __init__(self, renderer: Any, max_model_len: int) -> None:
        self._renderer = renderer
        self._max_model_len = max_model_len
        self.known: frozenset[int] = frozenset()

    async def continued(
        self, history: bytes, text: str, rendered: list[int], *, may_be_cut: bool = False
    ) -> Continued:
        """Return a prompt of `text` that begins with the longest fitting part of `history`, the session's packed token ids.

        rendered: the text's usual encoding. may_be_cut: whether it may be a part of the text only, as its client wished (`truncate_prompt_tokens`);
        if it is, it stays unchanged.
        """
        # The renderer's own thread does this: two threads in one tokenizer would disturb each other by its truncation setting.
        return await asyncio.get_running_loop().run_in_executor(
            self._renderer._executor, self._continued, history, text, rendered, may_be_cut
        )

    async def spells(self, token_ids: Sequence[int], answer: str) -> bool:
        """Return whether ids end with an answer in the served model's words: its session may be older than the model."""
        return await asyncio.get_running_loop().run_in_executor(
            self._renderer._executor, self._spells, list(token_ids), answer
        )

    def _spells(self, token_ids: list[int], answer: str) -> bool:
        from engine_bridge.driver.vllm_api import VLLMError

        try:
            self._renderer.validate_token_ids(token_ids)
        except VLLMError:
            return False
        return ends_with(self._renderer.get_tokenizer().decode(token_ids, skip_special_tokens=True), answer)

    def _continued(self, packed: bytes, text: str, rendered: list[int], may_be_cut: bool) -> Continued:
        from engine_bridge.driver.vllm_api import VLLMError

        history, tokenizer = unpack_token_ids(packed), self._renderer.get_tokenizer()
        if may_be_cut and tokenizer.decode(rendered, skip_special_tokens=False) != text:
            return Continued(rendered, "rendered", 0)
        try:
            self._renderer.validate_token_ids(history)
        except VLLMError:  # sessions outlive a change of the model
            return Continued(rendered, "rendered", 0)
        if self.known:
            made = continue_between_tokens(history, text, rendered, tokenizer, self.known)
        else:
            made = continue_prompt(history, text, rendered, tokenizer)
        # A sampler's spelling may be longer than the rendered one; it must not make a conversation too long.
        return made if len(made.token_ids) < self._max_model_len else Continued(rendered, "rendered", 0)
