"""The call under way: vLLM's serving classes ask the engine, and have text tokenised, without naming the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from engine_bridge.driver.serving.call_start import CallStart
from engine_bridge.driver.serving.continuing import CallIds
from engine_bridge.protocol.request_context import NOBODY, RequestContext


class ServingCall(NamedTuple):
    """An API call, or a turn of the gateway's own.

    Attributes:
        context: what the gateway says of the call.
        start: learns whether the call has been queued; None where that is not waited for.
        ids: the token ids of a call of a session, whose prompt continues them; None for all other calls.
    """

    context: RequestContext = NOBODY
    start: CallStart | None = None
    ids: CallIds | None = None


NO_CALL = ServingCall()
CALL: ContextVar[ServingCall] = ContextVar("call", default=NO_CALL)


@contextmanager
def called_by(context: RequestContext) -> Iterator[None]:
    """Set CALL to a call of this context inside `with`. Not for the whole body of a generator, whose reader it would leak to."""
    token = CALL.set(ServingCall(context))
    try:
        yield
    finally:
        CALL.reset(token)
