"""Separates a model's reasoning from its answer for turns of the gateway; for API calls vLLM's serving classes do it."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


class ReasoningSplit:
    """One answer's outputs, split by vLLM's parser as they come.

    Args:
        parser: vLLM's `Parser`, of this answer alone.
        request: the chat request that the answer is for.
    """

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser: Any = parser
        self._request = request
        # Some parsers leave the mark in an output that brings more than the mark.
        self._mark: str = (
            getattr(getattr(parser, "reasoning_parser", None), "reasoning_start_str", None) or ""
        )

    def __call__(self, output: Any) -> tuple[str, str]:
        """Return (reasoning, text) of one `RequestOutput` (delta kind).

        Should the parser fail, all that follows is text: an answer is never lost to it.
        """
        completion = output.outputs[0]
        if self._parser is None:
            return "", completion.text
        try:
            delta = self._parser.parse_delta(
                completion.text,
                list(completion.token_ids),
                self._request,
                output.prompt_token_ids,
                finished=bool(output.finished),
            )
        except Exception:
            log.exception("the reasoning parser failed; what follows of this answer is shown as text")
            self._parser = None
            return "", completion.text
        if delta is None:
            return "", ""
        reasoning = delta.reasoning or ""
        if reasoning:
            reasoning, self._mark = reasoning.removeprefix(self._mark), ""
        return reasoning, delta.content or ""
