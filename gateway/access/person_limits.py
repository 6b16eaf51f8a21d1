"""What one person may ask for and store, where an operator has set it for this person; the server's settings hold for all else. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs

# Of one limit. Chosen: twelve digits are far above all that can be meant.
MAX_LIMIT = 10**12 - 1
Limit = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]


class PersonLimits(Struct, frozen=True):
    """The limits of one person. None: the server's setting; 0: no limit.

    requests_per_min: API calls and chat messages that the model answers, a minute's worth of which may come at once. concurrent_requests: of them
    under way. stored_mib: of conversations. tokens_per_day: of prompts and answers, a UTC day.
    """

    requests_per_min: Limit | None = None
    concurrent_requests: Limit | None = None
    stored_mib: Limit | None = None
    tokens_per_day: Limit | None = None

    @property
    def fields(self) -> list[str]:
        """The limits that are set, as fields of a line of the key file: `requests-per-min=60`."""
        set_ones = {name: limit for name, limit in structs.asdict(self).items() if limit is not None}
        return [f"{name.replace('_', '-')}={limit}" for name, limit in set_ones.items()]


NAMES = PersonLimits.__struct_fields__
SERVERS = PersonLimits()
FIELD_NAMES = tuple(name.replace("_", "-") for name in NAMES)


def in_force(own: int | None, servers: int) -> int:
    """Return the limit that holds: the person's own, else the server's; 0: no limit."""
    return servers if own is None else own
