"""Stand-ins for parts that an engine is built without: they have nothing to do, hold nothing and know nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engine_bridge.protocol.node import AdvisoryReport

if TYPE_CHECKING:
    from engine_bridge.adapters.files import ModelContract
    from engine_bridge.adapters.registry import AdapterRecord
    from engine_bridge.core.kv.expected import Hashes, OnChange
    from engine_bridge.protocol.figures import AdapterStats
    from engine_bridge.protocol.node import AdapterPlace, Advisory


class Idle:
    """A part that moves nothing between steps."""

    def has_work(self) -> bool:
        """Return False: there is nothing to do."""
        return False

    def wait_s(self) -> float | None:
        """Return None: there will be nothing to do."""
        return None

    def advance(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


class NoAdapters(Idle):
    """Stands in for `Residency` without LoRA."""

    contract: ModelContract | None = None
    copies: None = None

    def add(self, record: AdapterRecord) -> None:
        """Do nothing: no adapter can be loaded."""

    def remove(self, version_id: int) -> None:
        """Do nothing: no adapter is here."""

    def expect(self, version_id: int) -> None:
        """Do nothing: no adapter can be read ahead."""

    def announce(self, advisory: Advisory, version_id: int) -> None:
        """Do nothing: no adapter can be brought nearer."""

    def accounted(self, version_id: int, report: AdvisoryReport) -> AdvisoryReport:
        """Return the report unchanged: it has no adapter to account for."""
        return report

    def begin_step(self) -> None:
        """Do nothing: no step computes with adapters."""

    def end_step(self) -> dict[int, Any]:
        """Return no errors: no adapter has failed."""
        return {}

    def settle(self, errors: dict[int, Any]) -> None:
        """Do nothing: no adapter has failed."""

    def requested(self, request_id: str, adapter_id: int) -> None:
        """Do nothing: no request has an adapter."""

    def released(self, request_id: str, adapter_id: int) -> None:
        """Do nothing: no request has an adapter."""

    def put_back(self, adapter_ids: Iterable[int], *, keeps_host: bool) -> None:
        """Do nothing: no adapter is here."""

    def places(self) -> Mapping[int, AdapterPlace]:
        """Return no places: no adapter is here."""
        return {}

    def stats(self) -> AdapterStats | None:
        """Return None: there are no figures."""
        return None


class NoRanks:
    """Stands in for `Ranks` where the engine's worker is in this process, which no other process can end."""

    has_failed = False

    def check(self) -> None:
        """Do nothing."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Do nothing."""


class NoPromoter(Idle):
    """Stands in for `Promoter` where there are no tiers to bring KV from."""

    def remembers(self, session_id: str, salt: str | None) -> bool:
        """Return False: no session's prefix is known."""
        return False

    def give_up(self) -> None:
        """Do nothing: there are no advisories."""

    def forget(self, session_id: str, tenant: str) -> None:
        """Do nothing: no session's prefix is known."""

    def set_idle(self, session_id: str, salt: str | None) -> None:
        """Do nothing: without tiers a session's blocks on the device have no second place."""

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        """Report the advisory as unknown at once."""
        on_change(
            AdvisoryReport(advisory_id=advisory.advisory_id, session_id=advisory.session_id, state="unknown")
        )

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """Do nothing: every advisory has ended already."""
