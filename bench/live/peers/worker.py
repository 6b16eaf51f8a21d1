"""A worker process: one engine that does commands from stdin. Started by `bench.live.peers.client.Worker`.

python -m bench.live.peers.worker KIND SETTINGS_JSON
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from bench.live.peers.adapters import AdapterSettings
from bench.live.peers.engine import Settings

COMMANDS = frozenset(
    (
        "turn batch place settle memcpy kv_files host_copy disk_read slow_disk layerwise cpu_s "
        "begin people people_beside hold agents draft advisory_cost accounts "
        "play put empty set_assist adapter_account "
        "use counts preemptions decision_share note_work steps note_predictions predictions equal_copies"
    ).split()
)


def settings_of(kind: str, options: dict[str, Any]) -> Any:
    has_adapters = kind.startswith(("adapters_", "scheduling_"))
    return AdapterSettings(**options) if has_adapters else Settings(**options)


def make_engine(kind: str, settings: Any) -> Any:
    """Import late: our side's modules do not exist in a peer's interpreter, nor the peer's in ours."""
    if kind in ("ours", "ours_off"):
        from bench.live.peers.ours import TieredNode

        return TieredNode(settings, has_tiers=kind == "ours")
    if kind == "ours_disk":
        from bench.live.peers.ours_disk import DiskNode

        return DiskNode(settings)
    if kind == "adapters_ours":
        from bench.live.peers.adapters_ours import NodeAdapters

        return NodeAdapters(settings)
    if kind == "scheduling_ours":
        from bench.live.peers.scheduling_ours import ScheduledNode

        return ScheduledNode(settings)
    if kind in ("adapters_peer", "adapters_stock"):
        from bench.live.peers.adapters_stock import StockAdapters

        return StockAdapters(settings, has_our_wrapper=kind == "adapters_peer")
    from bench.live.peers import stock

    return stock.ENGINES[kind](settings)


def main() -> None:
    # Libraries print to stdout: keep it for replies, and let them have stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    kind, options = sys.argv[1], json.loads(sys.argv[2])
    engine = make_engine(kind, settings_of(kind, options))
    try:
        reply({"ok": engine.describe()})
        for line in sys.stdin.buffer:
            command = json.loads(line)
            name = command.pop("do")
            try:
                if name not in COMMANDS:
                    raise ValueError("no such command")
                reply({"ok": getattr(engine, name)(**command)})
            except Exception as error:
                traceback.print_exc()
                reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.close()


if __name__ == "__main__":
    main()
