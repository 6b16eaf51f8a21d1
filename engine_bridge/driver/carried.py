"""The request of the gateway that a request of vLLM's carries to the scheduler and the connector."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest, LengthGuess

# The name in `SamplingParams.extra_args` under which a request carries what vLLM does not know.
FACTS = "overture"


def facts_of(request: Any) -> EngineRequest:
    """Return the gateway's request that a request of vLLM's was made for; `ANONYMOUS` for a request that did not come from the gateway."""
    params = request.sampling_params
    facts = (params.extra_args or {}).get(FACTS) if params is not None else None
    return facts if isinstance(facts, EngineRequest) else ANONYMOUS


def tell(request: Any, facts: EngineRequest) -> None:
    """Make a request of vLLM's carry this one, in place of the one it had."""
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), FACTS: facts}


def tell_guess(request: Any, guess: LengthGuess) -> None:
    """Add a length prediction to what a request carries."""
    tell(request, msgspec.structs.replace(facts_of(request), guess=guess))
