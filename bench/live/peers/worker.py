"""A worker process: one engine that does commands from stdin. Started by `bench.live.peers.client.Worker`.

python -m bench.live.peers.worker KIND SETTINGS_JSON
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from typing import Any

from bench.live.peers.engine import Engine, Settings
from bench.live.peers.ours import Ours
from bench.live.peers.stock import Stock

KINDS: dict[str, tuple[type[Ours | Stock], dict[str, Any]]] = {
    "ours": (Ours, {}),
    "ours_off": (Ours, {"has_tiers": False}),
    "ours_disk": (Ours, {"has_page_cache": False}),
    "stock": (Stock, {}),
}
"""Each kind's engine, and the settings in which it differs."""


def main() -> None:
    """Do the commands of standard input until it ends."""
    # Libraries print to stdout: keep it for replies, and let them have stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        """Write one line of JSON."""
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    make, changes = KINDS[sys.argv[1]]
    engine: Engine = make(replace(Settings(**json.loads(sys.argv[2])), **changes))
    try:
        reply({"ok": engine.describe()})
        for line in sys.stdin.buffer:
            command = json.loads(line)
            try:
                reply({"ok": getattr(engine, command.pop("do"))(**command)})
            except Exception as error:
                traceback.print_exc()
                reply({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.close()


if __name__ == "__main__":
    main()
