"""What the gateway tells the scheduler of a request, beside what vLLM knows."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.predict.length import LengthFeatures, LengthGuess

# Under this name of `SamplingParams.extra_args` a request carries what vLLM does not know of it.
FACTS = "overture"


class RequestFacts(Struct, frozen=True, kw_only=True):
    """What the gateway knows of a request.

    weight: its tenant's share against others'. features: what its answer's length is predicted from. guess: what a user's own predictor said of it;
    None: the scheduler asks the node's.
    """

    tenant: str = ""
    session: str = ""
    adapter: str = ""
    rank: int = 0
    weight: float = 1.0
    features: LengthFeatures | None = None
    guess: LengthGuess | None = None


NOTHING_KNOWN = RequestFacts()


def facts_of(request: Any) -> RequestFacts:
    params = request.sampling_params
    facts = (params.extra_args or {}).get(FACTS) if params is not None else None
    return facts if isinstance(facts, RequestFacts) else NOTHING_KNOWN


def tell(request: Any, facts: RequestFacts) -> None:
    """Have a request carry these facts, in place of those that it carries."""
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), FACTS: facts}


def tell_guess(request: Any, guess: LengthGuess) -> None:
    tell(request, msgspec.structs.replace(facts_of(request), guess=guess))
