"""In which order does a lane start its requests best? `mlq` with and without aging, against the paper's rule and one queue.

    python -m bench.emulated aging [--rate R ...] [--requests N] [--seed N] [--flat]

Arms: `vllm`, its own queue; `mlq`, as it serves: who has waited for an eighth of a second goes by waiting time over length; `mlq, aging 1 s`;
`mlq, smallest first`: never; `mlq, paper`: smallest first, and nobody is ever overdue (Chameleon §4.2). Four predictions of five are right
(Chameleon's 80%). TTFT in virtual seconds, of all requests. The device: an A40 with Llama-2-7B and requests a quarter as long as a chat's, of which
it answers some eight a second; --flat: steps of 18 ms and 0.11 ms a token, 128 requests and 4,000 blocks.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

from bench.emulated.device import FlatCost
from bench.emulated.node import Engine
from bench.emulated.trace import arrivals, lognormal, play_on_node
from bench.live.report import report
from bench.measures import quantile
from bench.sim.core.calibration import A40
from bench.sim.core.guesses import Classes
from bench.sim.core.models import LLAMA2_7B
from bench.sim.core.shapes import pool_blocks
from bench.sim.core.steps import StepCost
from engine_bridge.policy.mlq import Mlq, MlqSettings

RATES = (6.0, 8.0, 9.0)
LENGTH_SHARE = 0.3
ACCURACY = 0.8
SETTINGS = {
    "mlq": MlqSettings(),
    "mlq, aging 1 s": MlqSettings(aging_s=1.0),
    "mlq, smallest first": MlqSettings(aging_s=math.inf),
    "mlq, paper": MlqSettings(aging_s=math.inf, max_wait_s=math.inf),
}


def made_with(settings: MlqSettings) -> Callable[[int], Mlq]:
    return lambda num_tokens: Mlq(num_tokens, settings)


def run(args: argparse.Namespace) -> None:
    cost: StepCost = FlatCost() if args.flat else StepCost(A40, LLAMA2_7B)
    engine = Engine(4000, max_running=128) if args.flat else Engine(pool_blocks(cost))
    lengths = lognormal(args.requests, args.seed)
    if not args.flat:
        lengths = lengths.scaled(LENGTH_SHARE)
    found: dict[str, dict[str, Any]] = {}
    rows = []
    for rate in args.rate or RATES:
        requests = arrivals(lengths, rate, args.requests, args.seed)
        for name in ("vllm", "fcfs", *SETTINGS):
            guesser = Classes([answer for _, answer in lengths.pairs], ACCURACY, args.seed)
            policy = made_with(SETTINGS[name]) if name in SETTINGS else name
            jobs = play_on_node(policy, requests, cost, engine, guesser).jobs
            ttft_s = [job.ttft_s for job in jobs]
            own = {
                "ttft_p50_s": round(quantile(ttft_s, 0.5), 4),
                "ttft_p99_s": round(quantile(ttft_s, 0.99), 4),
                "ttft_worst_s": round(max(ttft_s), 4),
                "ttft_mean_s": round(sum(ttft_s) / len(ttft_s), 4),
            }
            found.setdefault(f"{rate:g}", {})[name] = own
            text = ", ".join(f"{key[5:-2]} {value:.3f}" for key, value in own.items())
            rows.append((f"{rate:g}/s, {name}", text, ""))
            print("  ", *rows[-1], file=sys.stderr, flush=True)
    result = {
        "bench": "emulated-aging",
        "requests": args.requests,
        "seed": args.seed,
        "flat": args.flat,
        "at": found,
    }
    report("TTFT by the order in lanes, s", rows, result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=float, action="append", help="requests a second; 6, 8 and 9 by default"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flat", action="store_true")
