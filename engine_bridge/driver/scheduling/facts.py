"""What the gateway tells the scheduler of a request, beside what vLLM knows."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

# Under this name of `SamplingParams.extra_args` a request carries what vLLM does not know of it.
FACTS = "overture"


class RequestFacts(Struct, frozen=True, kw_only=True):
    """What the gateway knows of a request. `weight`: its tenant's share against others'."""

    tenant: str = ""
    session: str = ""
    adapter: str = ""
    rank: int = 0
    adapter_bytes: int = 0
    weight: float = 1.0


NOTHING_KNOWN = RequestFacts()


def facts_of(request: Any) -> RequestFacts:
    params = request.sampling_params
    facts = (params.extra_args or {}).get(FACTS) if params is not None else None
    return facts if isinstance(facts, RequestFacts) else NOTHING_KNOWN
