"""The answers under way, each by the id that the engine knows it by: there from the start, whether or not there is an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Stream(Protocol):
    """Takes an answer's outputs, or the error that ends it."""

    def put(self, output: Any, /) -> None:
        """Take an output, or an exception that ends the answer."""


class Streams:
    """The answers of one node. On the event loop only. idle: set while there are no answers."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._begin_again: dict[str, Callable[[Exception], None]] = {}
        """The functions that begin requests again, by the ids of requests that have had no output yet."""
        self.idle = asyncio.Event()
        self.idle.set()

    def register(self, unique_id: str, stream: Stream) -> None:
        """Deliver this request's outputs to `stream` from now on."""
        self._streams[unique_id] = stream
        self.idle.clear()

    def may_begin_again(self, unique_id: str, begin_again: Callable[[Exception], None]) -> None:
        """Set the function that is called, once, if the engine gives this request up because its adapter changes, before its first output."""
        self._begin_again[unique_id] = begin_again

    def forget(self, unique_id: str) -> None:
        """Deliver this request's outputs no more."""
        self._streams.pop(unique_id, None)
        self._begin_again.pop(unique_id, None)
        if not self._streams:
            self.idle.set()

    def deliver(self, outputs: Iterable[Any]) -> None:
        """Hand one or more steps' outputs to their streams."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            self._begin_again.pop(output.request_id, None)
            if stream is not None:
                failure = getattr(output, "failure", None)
                # An exception takes the place of outputs that wait; a note on one of them would be lost when they are merged.
                self._put(stream, output if failure is None else failure)

    def fail(self, unique_id: str, error: Exception) -> None:
        """End a stream with an error, if it is still waited for."""
        stream = self._streams.get(unique_id)
        if stream is not None:
            self._put(stream, error)

    def fail_all(self) -> None:
        """End every stream with a clear error: the engine under them has failed."""
        self._fail_each(lambda: _failures().engine_failed())

    def end_all(self, why: str) -> None:
        """End every stream with an error that asks for another try. why: a sentence for clients."""
        self._fail_each(lambda: _failures().ended(why))

    def _fail_each(self, error: Callable[[], Exception]) -> None:
        for stream in list(self._streams.values()):
            self._put(stream, error())

    @staticmethod
    def _put(stream: Stream, piece: Any) -> None:
        """Put an output into its stream. A stream that cannot take it ends; later outputs of the same step are still delivered."""
        try:
            stream.put(piece)
        except Exception:
            log.exception("an output could not be put into its answer, which ends")
            if not isinstance(piece, Exception):
                stream.put(_failures().lost())

    def give_up(self, unique_ids: Iterable[str], error: Exception) -> None:
        """End the streams of requests that the engine gave up, unless they may begin again."""
        is_changing = _failures().is_changing(error)
        for unique_id in unique_ids:
            begin_again = self._begin_again.pop(unique_id, None)
            if is_changing and begin_again is not None:
                begin_again(error)
            else:
                self.fail(unique_id, _failures().given_up(error))

    def has(self, unique_id: str) -> bool:
        """Return whether this answer is still waited for."""
        return unique_id in self._streams

    def asked_as(self, request_ids: set[str]) -> list[str]:
        """Return our ids of the requests to which clients gave these ids."""
        return [unique_id for unique_id in self._streams if unique_id.rpartition("-")[0] in request_ids]


def _failures() -> Any:
    """Return the module of vLLM's exceptions. vLLM is slow to import, but loaded by the time that a stream fails."""
    from engine_bridge.driver.serving import stream_failures

    return stream_failures
