"""The facts that a request carries through vLLM to the scheduler and the connector, beside vLLM's own fields."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.predict.length import LengthFeatures, LengthGuess
from engine_bridge.protocol.request_context import NOBODY, RequestContext

# The name in `SamplingParams.extra_args` under which a request carries the facts that vLLM does not know.
FACTS = "overture"


class Carried(Struct, frozen=True, kw_only=True):
    """The gateway's context as it came, and what the engine's side adds.

    Attributes:
        context: what the gateway says of the request.
        rank: the rank of the request's adapter; 0 without one.
        features: what the answer's length is predicted from.
        guess: the length that a user's own predictor returned; None: the scheduler asks the node's predictor.
        client_salt: the client's own salt that keeps its KV apart, before the tenant's and the adapter's were added.
    """

    context: RequestContext = NOBODY
    rank: int = 0
    features: LengthFeatures | None = None
    guess: LengthGuess | None = None
    client_salt: str | None = None


NOTHING_CARRIED = Carried()


def facts_of(request: Any) -> Carried:
    """Return what the gateway sent along with a request; `NOTHING_CARRIED` for a request that did not come from the gateway."""
    params = request.sampling_params
    facts = (params.extra_args or {}).get(FACTS) if params is not None else None
    return facts if isinstance(facts, Carried) else NOTHING_CARRIED


def tell(request: Any, facts: Carried) -> None:
    """Make a request carry these facts, in place of those it had."""
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), FACTS: facts}


def tell_guess(request: Any, guess: LengthGuess) -> None:
    """Add a length prediction to the facts that a request carries."""
    tell(request, msgspec.structs.replace(facts_of(request), guess=guess))
