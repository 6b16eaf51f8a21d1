"""A call of OpenAI's or Anthropic's APIs on one of several nodes, and on another one if the first fails before there is anything to pass on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.node import COUNTING_APIS, Api, JsonReply
from gateway.nodes.chosen_node import ChosenNode, Places
from gateway.nodes.estimates import CHARS_PER_TOKEN, Asks


class RoutedCall:
    """A call of `Node.serve` on one of several nodes.

    Where the reply is streamed, this object is its events, too; closing it before the first event is read stops the call.
    """

    def __init__(
        self,
        places: Places,
        asks: Asks,
        api: Api,
        body: object,
        headers: Mapping[str, str],
        request: EngineRequest,
    ) -> None:
        self._places, self._asks = places, asks
        self._api, self._body, self._headers, self._request = api, body, headers, request
        self._place: ChosenNode | None = None
        self._events: AsyncIterator[bytes] | None = None
        self._failed: dict[str, BridgeError] = {}
        self._num_events = 0

    async def begin(self) -> JsonReply | None:
        """Send the call to a node. Returns the whole reply; None where its events follow."""
        while True:
            place = self._place = self._enter()
            try:
                reply = await place.node.serve(
                    self._api, self._body, self._headers, place.request(self._request)
                )
            except EngineUnavailable as error:
                self._cut(error)
                continue
            except BaseException:
                self._leave()
                raise
            if isinstance(reply, JsonReply):
                if reply.status == 200:
                    self._note_end(len(reply.body) // CHARS_PER_TOKEN)
                self._leave()
                return reply
            self._events = reply.events
            return None

    def __aiter__(self) -> RoutedCall:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if self._events is None:
                raise StopAsyncIteration
            try:
                event = await anext(self._events)
            except EngineUnavailable as error:
                self._events = None
                self._cut(error)
                if await self.begin() is not None:
                    raise  # a whole reply, where a stream was promised
            except StopAsyncIteration:
                self._events = None
                self._note_end(self._num_events)
                self._leave()
                raise
            except BaseException:
                self._events = None
                self._leave()
                raise
            else:
                self._num_events += 1
                return event

    async def aclose(self) -> None:
        """Stop the call."""
        events, self._events = self._events, None
        try:
            if events is not None:
                await events.aclose()  # type: ignore[attr-defined]
        finally:
            self._leave()

    def _enter(self) -> ChosenNode:
        request, body = self._request, self._body
        # Counting belongs to no conversation, and must not move one.
        session_id = request.session_id if self._api not in COUNTING_APIS else ""
        return self._places.enter(
            (request.tenant, session_id),
            lambda name: self._asks.of_body(name, body, request),
            self._failed,
        )

    def _cut(self, error: EngineUnavailable) -> None:
        """Note that the call's node failed it: another node may be tried, once and as long as nothing was passed on. Else raises the error."""
        assert self._place is not None
        try:
            self._places.fail(self._place, self._failed, error, has_begun=self._num_events > 0)
        finally:
            self._leave()

    def _note_end(self, num_answer_tokens: int) -> None:
        """Note the estimated length of the answer: an event, or four characters, are taken for one token."""
        self._asks.answered(num_answer_tokens)
        if self._place is not None:
            self._place.num_tokens = self._place.num_prompt_tokens + num_answer_tokens

    def _leave(self) -> None:
        if self._place is not None:
            self._places.leave(self._place)
            self._place = None
