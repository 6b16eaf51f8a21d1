"""One answer on its way from the engine thread's outputs to whoever reads it, merged while the reader rests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from engine_bridge.protocol.engine_request import CalledTool
from engine_bridge.protocol.node import Delta, FinishReason, KvSources, Prompt, Timings, Usage

# Of an output of vLLM's, in the order in which they come: (reasoning, text).
Split = Callable[[Any], tuple[str, str]]


def sources_of(output: Any) -> KvSources:
    """Return where the KV of a request's prompt came from, as the connector noted it on the first output.

    Without KV tiers all cached tokens were on the device.
    """
    noted = getattr(output, "kv_sources", None)
    num_cached, num_prompt = output.num_cached_tokens or 0, len(output.prompt_token_ids or ())
    device, host, disk, peer = (
        (noted.device, noted.host, noted.disk, noted.peer) if noted is not None else (num_cached, 0, 0, 0)
    )
    return KvSources(device, host, disk, num_prompt - device - host - disk - peer, peer)


class TokenStream:
    """Collects one request's outputs until its reader takes them; belongs to the event loop.

    Outputs that arrive while the reader is busy, or together, are merged into one delta. The bridge decides how often outputs arrive.

    Attributes:
        prompt: the prompt for the last delta, once it is known.
        split: tells the reasoning in an output from its text, if the model has a parser for that; set before the first output.
        calls: returns the tools that the answer has called, once all its outputs have gone through `split`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self.split: Split | None = None
        self.calls: Callable[[], tuple[CalledTool, ...]] = tuple
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._error: Exception | None = None
        self._finish_reason: FinishReason | None = None
        self.is_ended_by_engine = False
        self.prompt: Prompt | None = None
        self._arrived_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._arrived_s
        self._num_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._kv = KvSources(0, 0, 0, 0)
        self._queue_ms: float | None = None

    # -- the engine's side -------------------------------------------------------------------------------------------

    def put(self, output: Any) -> None:
        """Take a `RequestOutput` of vLLM (delta kind), or the exception that ends the stream."""
        if self._finish_reason is not None:
            return
        if isinstance(output, Exception):
            self._error = output
        else:
            completion = output.outputs[0]
            reasoning, text = ("", completion.text) if self.split is None else self.split(output)
            self._text.append(text)
            self._reasoning.append(reasoning)
            self._token_ids.extend(completion.token_ids)
            if self._first_s is None:
                self._note_start(output)
            if output.finished:
                self.is_ended_by_engine = True
                self._finish_reason = _finish_reason(completion.finish_reason)
                self._last_s = time.monotonic()
        self._notify()

    @property
    def is_over(self) -> bool:
        """Whether the end has come, read or not."""
        return self._finish_reason is not None or self._error is not None

    def stop(self) -> None:
        """End the stream from outside; the text so far stands, with finish_reason `stopped`."""
        if self._finish_reason is None:
            self._finish_reason = "stopped"
            self._last_s = time.monotonic()
            self._notify()

    def _note_start(self, output: Any) -> None:
        self._first_s = time.monotonic()
        self._prompt_tokens = len(output.prompt_token_ids or ())
        self._cached_tokens = output.num_cached_tokens or 0
        self._kv = sources_of(output)
        stats = output.metrics
        if stats is not None and stats.scheduled_ts and stats.queued_ts:
            self._queue_ms = (stats.scheduled_ts - stats.queued_ts) * 1000

    # -- the reader's side -------------------------------------------------------------------------------------------

    async def next(self) -> Delta:
        """Wait for more. After a delta with a `finish_reason` there is no more. Raises the error that ended the stream."""
        while not (self._token_ids or self._error or self._finish_reason):
            self._wake = self._loop.create_future()
            await self._wake
        if self._error is not None and not self._finish_reason:
            raise self._error
        self._num_tokens += len(self._token_ids)
        delta = Delta(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            usage=self._usage() if self._finish_reason else None,
            timings=self._timings() if self._finish_reason else None,
            prompt=self.prompt if self._finish_reason else None,
            reasoning="".join(self._reasoning),
            # An answer that was cut may have been cut within a call.
            calls=self.calls() if self._finish_reason == "stop" else (),
        )
        self._text.clear()
        self._reasoning.clear()
        self._token_ids.clear()
        return delta

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # -- figures -----------------------------------------------------------------------------------------------------

    def _usage(self) -> Usage:
        num_left_out = self.prompt.dropped.messages if self.prompt is not None else 0
        return Usage(self._prompt_tokens, self._num_tokens, self._cached_tokens, num_left_out)

    def _timings(self) -> Timings:
        e2e_s = self._last_s - self._arrived_s
        first_s = None if self._first_s is None else self._first_s - self._arrived_s
        tpot_s = None
        if first_s is not None and self._num_tokens > 1:
            tpot_s = (e2e_s - first_s) / (self._num_tokens - 1)
        return Timings(
            queue_ms=_rounded(self._queue_ms),
            ttft_ms=None if first_s is None else _rounded(first_s * 1000),
            tpot_ms=None if tpot_s is None else _rounded(tpot_s * 1000),
            e2e_ms=round(e2e_s * 1000, 2),
            kv=self._kv,
        )


def _rounded(value_ms: float | None) -> float | None:
    return None if value_ms is None else round(value_ms, 2)


def _finish_reason(reason: str | None) -> FinishReason:
    return reason if reason in ("stop", "length") else "stopped"  # type: ignore[return-value]
