"""All that a GPU is to decide, in one command that ends when its time is over.

    python -m bench.live.gpu [--minutes 20] [--only correct,copies] [--dry]

Its parts run in this order, the one that is worth most first; each prints a line of JSON whenever it has found something, and the last line of all
says what is right and what was left out. A part begins only while time is left, and stops between two findings when it is over.

  correct        0.6 B random weights: an adapter from disk, host memory and its slot; prompts from device, host memory and disk; a failed step
  hybrid         the tiers with recurrent layers
  copies         the link each way and both ways at once, our copies of blocks, and vLLM's batched ones
  beside_ours, beside_stock
                 32 streams alone, while conversations of 16,384 tokens are restored from host memory, one a second, and while such ones are promoted:
                 time per token, P99 between tokens and tokens/s, each against alone, where P99 is to be at most 1.1. `beside_stock` is vLLM with
                 its OffloadingConnector, which promotes nothing
  ours, stock, stock_offload, ours_off
                 the shape of Llama 3 8B: time per token, P99 between tokens and tokens/s at 1, 16, 64 and 256 streams, with the sizes of batches that
                 `vllm serve` takes; time to the first token of 2,048 to 32,768 tokens, computed, resident and from host memory. `stock` is vLLM
                 itself, `stock_offload` with its own OffloadingConnector, `ours_off` ours without KV tiers
  adapters_ours, adapters_stock
                 64 adapters of ranks 8 to 128, asked for by and by
  http           histories over HTTP, with advisories (`bench.live.gpu.tiers`)

`--dry` plays all of it with the demo model on a CPU, in tiny numbers, to see that it runs: its figures mean nothing. The exit status is 1 where an
answer is wrong or a part has failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.live.gpu.parts import DRY, GPU, NEEDS_GPU, PARTS, Found, Run
from bench.live.shared.report import machine, options

# Of the time that is left, what a part needs at least to be begun. Measured on an H200: an engine starts in a minute.
LEAST_S = 90.0


def main() -> int:
    """Run the bench from the command line; returns the exit status."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="when to stop")
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--dry", action="store_true", help="try the bench itself, on a CPU")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name] or list(PARTS)
    if unknown := set(names) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    gpu = "" if args.dry else gpu_name()
    if not args.dry and not gpu:
        print(
            "There is no GPU here (nvidia-smi shows none): try the bench itself with --dry.", file=sys.stderr
        )
        return 2
    skipped = NEEDS_GPU if args.dry else frozenset[str]()
    with tempfile.TemporaryDirectory(prefix="overture-gpu-") as folder:
        run = Run(DRY if args.dry else GPU, Path(folder))
        parts = {name: partial(PARTS[name], run) for name in names if name not in skipped}
        told = play(parts, args.minutes) | {"needs_a_gpu": sorted(skipped & set(names))}
    line({"part": "all", "gpu": gpu or "none", "machine": machine()} | told)
    return 1 if told["wrong"] or told["failed"] else 0


def play(parts: Mapping[str, Callable[[], Found]], minutes: float) -> dict[str, list[str]]:
    """Play these parts until the time is over, and print their findings. Returns names of parts: wrong, failed, skipped and stopped ones."""
    ends_s = time.monotonic() + 60 * minutes
    told: dict[str, list[str]] = {"wrong": [], "failed": [], "skipped": [], "stopped": []}
    for name, part in parts.items():
        if ends_s - time.monotonic() < LEAST_S:
            told["skipped"].append(name)
            continue
        began_s = time.monotonic()
        found = part()
        try:
            for each in found:
                line({"part": name, "after_s": round(time.monotonic() - began_s, 1)} | each)
                told["wrong"] += [name] if each.get("is_right", True) is False else []
                if time.monotonic() > ends_s:
                    told["stopped"].append(name)
                    break
        except Exception as error:  # the other parts are worth their time all the same
            line({"part": name, "failed": f"{type(error).__name__}: {error}"[-3000:]})
            told["failed"].append(name)
        finally:
            found.close()  # which ends its engine
    return told


def line(found: dict[str, Any]) -> None:
    """Print a finding."""
    print(json.dumps(found), flush=True)


def gpu_name() -> str:
    """Return the name of the first GPU; "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
