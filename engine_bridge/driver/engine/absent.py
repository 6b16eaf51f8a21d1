"""Stand-ins for parts that an engine is built without: they have nothing to do, hold nothing and know nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_bridge.protocol.node import AdvisoryReport

if TYPE_CHECKING:
    from engine_bridge.adapters.files import ModelContract
    from engine_bridge.core.kv.expected import Hashes, OnChange
    from engine_bridge.protocol.figures import AdapterStats
    from engine_bridge.protocol.node import AdapterPlace, Advisory


def _nothing(self: Any, *args: Any, **options: Any) -> None:
    """Do nothing, as a method of a part that is not there."""


class Idle:
    """A part that moves nothing between steps."""

    def has_work(self) -> bool:
        """Return False: there is nothing to do."""
        return False

    def wait_s(self) -> float | None:
        """Return None: there will be nothing to do."""
        return None

    advance = close = _nothing


class NoAdapters(Idle):
    """Stands in for `Residency` without LoRA: no adapter can be loaded, and no request has one."""

    contract: ModelContract | None = None
    copies: None = None
    add = remove = expect = announce = begin_step = settle = requested = released = put_back = _nothing

    def accounted(self, version_id: int, report: AdvisoryReport) -> AdvisoryReport:
        """Return the report unchanged: it has no adapter to account for."""
        return report

    def end_step(self) -> dict[int, Any]:
        """Return no errors: no adapter has failed."""
        return {}

    def places(self) -> Mapping[int, AdapterPlace]:
        """Return no places: no adapter is here."""
        return {}

    def stats(self) -> AdapterStats | None:
        """Return None: there are no figures."""
        return None


class NoRanks:
    """Stands in for `Ranks` where the engine's worker is in this process, which no other process can end."""

    has_failed = False
    check = watch = _nothing


class NoPromoter(Idle):
    """Stands in for `Promoter` where there are no tiers to bring KV from: every advisory ends at once."""

    forget = give_up = retract = set_idle = _nothing

    def remembers(self, session_id: str, salt: str | None) -> bool:
        """Return False: no session's prefix is known."""
        return False

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        """Report the advisory as unknown at once."""
        on_change(
            AdvisoryReport(advisory_id=advisory.advisory_id, session_id=advisory.session_id, state="unknown")
        )
