"""What a request carries through vLLM to the scheduler and the connector, beside what vLLM has fields for."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.predict.length import LengthFeatures, LengthGuess
from engine_bridge.protocol.request_context import NOBODY, RequestContext

# Under this name of `SamplingParams.extra_args` a request carries what vLLM does not know of it.
FACTS = "overture"


class Carried(Struct, frozen=True, kw_only=True):
    """The gateway's context as it came, and what the engine's side adds.

    rank: of its adapter, 0 without one. features: what its answer's length is predicted from. guess: what a user's own predictor said of it; None:
    the scheduler asks the node's. client_salt: what the client asked to keep its KV apart by, before the tenant's and the adapter's were added.
    """

    context: RequestContext = NOBODY
    rank: int = 0
    features: LengthFeatures | None = None
    guess: LengthGuess | None = None
    client_salt: str | None = None


NOTHING_CARRIED = Carried()


def facts_of(request: Any) -> Carried:
    """What the gateway sent along with a request; nothing for one that did not come from the gateway."""
    params = request.sampling_params
    facts = (params.extra_args or {}).get(FACTS) if params is not None else None
    return facts if isinstance(facts, Carried) else NOTHING_CARRIED


def tell(request: Any, facts: Carried) -> None:
    """Have a request carry these facts, in place of those that it carries."""
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), FACTS: facts}


def tell_guess(request: Any, guess: LengthGuess) -> None:
    """Adds a length prediction to what was sent along with a request."""
    tell(request, msgspec.structs.replace(facts_of(request), guess=guess))
