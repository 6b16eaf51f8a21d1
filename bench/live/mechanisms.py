"""Mechanisms that no other bench tells apart, one figure or two of each; every part takes a minute at most.

    python -m bench.live.mechanisms [--only NAME ...]

The last line is JSON, with a part's figures under its name.
`handover` (spec's B2): a delta of one row and next to no weights through a CPU worker (`empty_ms`); of a usual one, 256 rows of rank 64, the part for
which the engine's thread waits (`blocked_share`). `cores` (B3): rows that one worker takes in a millisecond; so many for each of two workers, on both
over the same on one (`shared_vs_one`), and torch's own threads over that (`torch_vs_shared`). `registry` (B6): 40,000 adapters; opening the file and
reading them (`open_s`), and finding the adapter and choosing a node of 60 for a request (`decision_ms`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.live import mechanisms_host
from bench.live.report import Progress, options, report

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "handover": mechanisms_host.handover,
    "cores": mechanisms_host.cores,
    "registry": mechanisms_host.registry,
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given again")
    progress, result = Progress(), {}
    for name in parser.parse_args().only or PARTS:
        progress.say(name)
        result[name] = PARTS[name]()
    rows = [
        (f"{name}, {key}", str(value), "") for name, found in result.items() for key, value in found.items()
    ]
    report("Mechanisms", rows, result)


if __name__ == "__main__":
    main()
