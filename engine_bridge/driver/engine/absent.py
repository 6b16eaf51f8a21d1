"""What stands in for parts that an engine is built without: it has nothing to do, holds nothing and knows nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from engine_bridge.protocol.node import AdvisoryReport

if TYPE_CHECKING:
    from engine_bridge.adapters.files import ModelContract
    from engine_bridge.adapters.registry import AdapterRecord
    from engine_bridge.core.kv.expected import Hashes, OnChange
    from engine_bridge.protocol.node import AdapterPlace, AdapterStats, Advisory


class Idle:
    """Moves nothing between steps."""

    def has_work(self) -> bool:
        return False

    def wait_s(self) -> float | None:
        return None

    def advance(self) -> None: ...

    def close(self) -> None: ...


class NoAdapters(Idle):
    """In place of `Residency`, without LoRA."""

    contract: ModelContract | None = None
    copies: None = None

    def add(self, record: AdapterRecord) -> None: ...

    def remove(self, version_id: int) -> None: ...

    def expect(self, version_id: int) -> None: ...

    def announce(self, advisory: Advisory, version_id: int) -> None: ...

    def accounted(self, version_id: int, report: AdvisoryReport) -> AdvisoryReport:
        return report

    def begin_step(self) -> None: ...

    def end_step(self) -> dict[int, Any]:
        """No adapter has failed."""
        return {}

    def settle(self, errors: dict[int, Any]) -> None: ...

    def requested(self, request_id: str, adapter_id: int) -> None: ...

    def released(self, request_id: str, adapter_id: int) -> None: ...

    def free_room(self, running: Collection[int]) -> int | None:
        """None: adapters bound nobody's start."""
        return None

    def needed_room(self, adapter_id: int, running: Collection[int]) -> int:
        return 0

    def places(self) -> Mapping[int, AdapterPlace]:
        return {}

    def stats(self) -> AdapterStats | None:
        return None


class NoPromoter(Idle):
    """In place of `Promoter`, where there are no tiers to bring KV from."""

    def remembers(self, session_id: str, salt: str | None) -> bool:
        return False

    def forget(self, session_id: str) -> None: ...

    def advise(self, advisory: Advisory, hashes: Hashes, salt: str | None, on_change: OnChange) -> None:
        on_change(
            AdvisoryReport(advisory_id=advisory.advisory_id, session_id=advisory.session_id, state="unknown")
        )

    def retract(self, advisory_id: str, *, is_expired: bool) -> None: ...
