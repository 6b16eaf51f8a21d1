"""The call under way: vLLM's serving classes ask the engine, and have text tokenised, without naming the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest
from engine_bridge.protocol.node import CallFigures, SeenPicture, pack_token_ids
from engine_bridge.protocol.token_stream import sources_of

if TYPE_CHECKING:
    from engine_bridge.driver.vllm_api import EngineCoreRequest, RequestOutput


class CallAnswer(Protocol):
    """An answer as its call sees it."""

    async def begin(self) -> None:
        """Queue its request. Raises what stands against that."""

    def close(self) -> None:
        """End it."""


class Call:
    """An API call, or a turn of the gateway's own.

    Args:
        request: what the gateway says of the call.
        history: the token ids of the call's session so far, packed, with which its prompt continues; None for a call that continues no session.
        when_known: called once it is known whether a request of the call was queued.

    Attributes:
        answers: the answers that the call has asked for and that are not over, in their order.
        is_known: set once a request of the call was queued, or once there is a `failure`.
        failure: why no request of the call can be queued.
        first: the first output of the call's requests, once it was read.
        num_answer_tokens: tokens of the first answer so far.
        num_logprobs: number of log probabilities that whole answers have brought so far.
        banned_token: a token that its answers must not have; None: they may have all.
        is_strict: whether its answers must be held to the whole of their form.
        seen: the ids that the engine has read and written, packed; b"" until the answer is over, and where there were several answers.
    """

    def __init__(
        self,
        request: EngineRequest = ANONYMOUS,
        history: bytes | None = None,
        when_known: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self.answers: dict[CallAnswer, None] = {}
        self.is_known = asyncio.Event()
        self.failure: Exception | None = None
        self.first: RequestOutput | None = None
        self.num_answer_tokens = self.num_logprobs = 0
        self.banned_token: int | None = None
        self.is_strict = True
        self.seen = b""
        self._history = history
        self._when_known = when_known

    def take_history(self) -> bytes | None:
        """Return the history for the first request of the call, then None: further requests (several prompts) have nothing to do with it."""
        history, self._history = self._history, None
        return history

    def answered(self, prompt: EngineCoreRequest, generated: list[int]) -> None:
        """Note the ids of the prompt, with its pictures, and of its only answer, which is over."""
        pictures = [
            SeenPicture(each.mm_position.offset, each.mm_position.length, each.identifier)
            for each in prompt.mm_features or ()
        ]
        self.seen = pack_token_ids([*(prompt.prompt_token_ids or ()), *generated], pictures)

    @property
    def figures(self) -> CallFigures | None:
        """What its request has cost so far; None before its first output."""
        return CallFigures(sources_of(self.first), self.num_answer_tokens) if self.first is not None else None

    @property
    def is_queued(self) -> bool:
        """Whether a request was queued: a later failure need not be the client's fault."""
        return self.is_known.is_set() and self.failure is None

    def queued(self) -> None:
        """Note that the engine has a request of the call."""
        self._know()

    def failed(self, error: Exception) -> None:
        """Note why a request cannot be queued. Does nothing once one was queued."""
        if not self.is_known.is_set():
            self.failure = error
            self._know()

    def _know(self) -> None:
        self.is_known.set()
        self._when_known()

    def close(self) -> None:
        """End the call's answers: their requests leave the engine."""
        for answer in list(self.answers):
            answer.close()


CALL: ContextVar[Call] = ContextVar("call")


def current_call() -> Call:
    """Return the call under way, or a new one for work that belongs to no call."""
    return CALL.get(None) or Call()


@contextmanager
def called_by(request: EngineRequest) -> Iterator[None]:
    """Set CALL to a call of this request inside `with`. Not for the whole body of a generator, whose reader it would leak to."""
    token = CALL.set(Call(request))
    try:
        yield
    finally:
        CALL.reset(token)
