"""Mechanisms that no other bench tells apart, one figure or two of each; every part takes a minute at most.

    python -m bench.live.mechanisms [--only NAME ...]

The last line is JSON, with each part's figures under its name. In front of a part stands the mechanism's id in the specification.

Without an engine, or with one of their own
  B2 handover    a delta of one row and next to no weights through a CPU worker and back (`empty_ms`); of a usual one, 256 rows of rank 64, the part
                 for which the engine's thread waits (`blocked_share`)
  B3 cores       rows that one worker takes in a millisecond (`rows_per_core`); so many for each of two workers: on both over on one
                 (`shared_vs_one`), and on torch's own threads over that (`torch_vs_shared`)
  B6 registry    40,000 adapters: opening the file and reading them (`open_s`), finding one and choosing a node of 60 for it (`decision_ms`)
  E10 refusals   what vLLM's own connectors for host memory say on this platform
  B4 law         `overture profile`'s line of what adapters add to a decode step: over the sum of their ranks (`sum_rank_r2`), as our kernel reads
                 them, and over their number times the largest (`max_rank_r2`)

On one node with KV tiers and four adapters (`bench.live.models`; 150 blocks on the device)
  E10, E2 restores  a turn from each tier, with the same tokens and without computing the history (`is_restored`); share of its restore that computing
                 its front while the rest is loaded would save at best (`split_saves`)
  E8 apart       part of a prompt's KV that another tenant, adapter or version of the adapter reuses (`others_share`), and the same (`same_share`)
  E4 announced   TTFT of a session that goes on under an adapter; KV in host memory, adapter on disk: announced, not announced (`cold`), and with both
                 where they are computed with (`resident`)
  E11 switched   TTFT of the first question after another adapter was picked: the history computed at once, not, and with it on the device
  A7 giving_way  3,072 tokens on a device full of wrong guesses against an empty one: steps, preemptions and answers (`is_same`), TTFT
  E6 accounting  bytes that advisories and metrics say were moved for them, against what the disk's reader and the copier have counted (`off_share`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from bench.live import mechanisms_engine as engine
from bench.live import mechanisms_host as host
from bench.live.report import Progress, options, report

Part = dict[str, Any]
# In this order: an engine in this process leaves torch with its own number of threads.
ALONE: dict[str, Callable[[], Part]] = {
    "handover": host.handover,
    "cores": host.cores,
    "registry": host.registry,
    "refusals": engine.refusals,
    "law": engine.law,
}
ON_NODE: dict[str, Callable[[engine.MechanismNode], Part]] = {
    "restores": engine.restores,
    "apart": engine.apart,
    "announced": engine.announced,
    "switched": engine.switched,
    "giving_way": engine.giving_way,
    "accounting": engine.accounting,
}


def measured(names: Collection[str]) -> Iterator[tuple[str, Part]]:
    """Each of these parts' figures, one after the other."""
    for name in (name for name in ALONE if name in names):
        yield name, ALONE[name]()
    if on_node := [name for name in ON_NODE if name in names]:
        with engine.node() as node:
            for name in on_node:
                yield name, ON_NODE[name](node)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--only", choices=(*ALONE, *ON_NODE), action="append", help="this part; may be given again"
    )
    progress, result = Progress(), {}
    for name, found in measured(parser.parse_args().only or (*ALONE, *ON_NODE)):
        progress.say(name)
        result[name] = found
    rows = [
        (f"{name}, {key}", str(value), "") for name, found in result.items() for key, value in found.items()
    ]
    report("Mechanisms", rows, result)


if __name__ == "__main__":
    main()
