"""Tells reasoning, text and calls of tools apart in answers to turns of the gateway; for API calls vLLM's serving classes do it."""

from __future__ import annotations

import logging
from typing import Any

from engine_bridge.protocol.engine_request import CalledTool

log = logging.getLogger(__name__)


class OutputSplit:
    """One answer's outputs, split by vLLM's parser as they come. parser: vLLM's `Parser`, of this answer alone."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser: Any = parser
        self._request = request
        # Some parsers leave the mark in an output that brings more than the mark.
        self._mark: str = (
            getattr(getattr(parser, "reasoning_parser", None), "reasoning_start_str", None) or ""
        )
        self._calls: dict[int, list[str]] = {}
        """By the parser's number of a call, its id, name and arguments so far."""

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
            log.exception("vLLM's parser failed; what follows of this answer is shown as text")
            self._parser = None
            return "", completion.text
        if delta is None:
            return "", ""
        for call in delta.tool_calls or ():
            self._note(call)
        reasoning = delta.reasoning or ""
        if reasoning:
            reasoning, self._mark = reasoning.removeprefix(self._mark), ""
        return reasoning, delta.content or ""

    def _note(self, delta: Any) -> None:
        """Add a piece of a call: the first one has its id and name, the others more of its arguments."""
        known = self._calls.setdefault(delta.index, ["", "", ""])
        known[0] = known[0] or delta.id or ""
        if delta.function is not None:
            known[1] += delta.function.name or ""
            known[2] += delta.function.arguments or ""

    def calls(self) -> tuple[CalledTool, ...]:
        """Return the tools that the answer has called so far, in order."""
        return tuple(
            CalledTool(call_id, name, arguments)
            for _, (call_id, name, arguments) in sorted(self._calls.items())
            if name
        )
