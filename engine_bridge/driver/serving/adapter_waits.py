"""Requests whose adapter cannot be read at their turn, because its files are being replaced: they wait for its next version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from engine_bridge.driver.serving.adapter_versions import AdapterVersions
from engine_bridge.driver.serving.stream_failures import given_up
from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.vllm_api import EngineCoreRequest

# How long a request waits in all. Chosen: a trainer writes for seconds, its files must have come to rest, and are read and checked then.
PATIENCE_S: Final = 20.0
# How long until the files are looked at again: they may be restored, or only have been out of reach. Chosen.
READ_AGAIN_S: Final = 2.0


class AdapterWaits:
    """The waiting requests of one node. On the event loop only. launch: queues a request on the engine; the last argument is for `watch`."""

    def __init__(
        self,
        streams: Streams,
        versions: AdapterVersions,
        launch: Callable[[str, EngineCoreRequest, str | None, float | None], None],
    ) -> None:
        self._streams, self._versions, self._launch = streams, versions, launch
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(
        self, unique_id: str, request: EngineCoreRequest, prompt_text: str | None, until_s: float | None
    ) -> None:
        """Keep a copy of a request that goes to the engine, until its first output: the engine makes the object its own.

        `until_s` says how long the request waits in all, on the monotonic clock; None: it has not waited yet.
        """
        if request.lora_request is None:
            return
        again = msgspec.structs.replace(request)

        def begin_again(error: Exception) -> None:
            """Wait for the adapter's next version, and queue the copy then."""
            waiting = self._wait(
                unique_id, again, prompt_text, until_s or time.monotonic() + PATIENCE_S, error
            )
            task = asyncio.create_task(waiting)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._streams.may_begin_again(unique_id, begin_again)

    async def _wait(
        self,
        unique_id: str,
        request: EngineCoreRequest,
        prompt_text: str | None,
        until_s: float,
        error: Exception,
    ) -> None:
        try:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise given_up(error)
            await self._versions.until_news_of(request.lora_request, min(READ_AGAIN_S, left_s))
            if self._streams.has(unique_id):
                self._launch(unique_id, request, prompt_text, until_s)
        except Exception as failure:
            self._streams.fail(unique_id, failure)
