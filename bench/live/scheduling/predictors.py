"""How far off the predictions of steps and copies are in our node, each made just before it is seen, by the tables that serve and learn.

The node starts with `overture profile`'s tables. After a burst that it learns from, requests with the trace's lengths come at SHARE of what it
answers, then those of tight memory (always swapped). `step_error`, `swap_error`: mean relative error over all steps of both; of copies each way, the
worse of both ways. `swap_error_fitted`: of one set-up time and one bandwidth each way, fitted to the same copies afterwards. What equal steps and
copies of this engine differ by, in their order (`noise`), is what the emulated device's differ by, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.live.peers.engine import Settings
from bench.live.peers.play import Ask, text
from bench.live.peers.worker import Worker
from bench.live.shared.models import ModelShape
from bench.live.shared.traffic import TIGHT_RATE_PER_S, Traffic, tight_asks, tight_history
from bench.predicting import error_of, fitted_error
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

NUM_BLOCKS, MAX_MODEL_LEN, KV_HOST_GIB = 128, 2048, 1.0
BURST, SHARE = 48, 0.8
# Equal steps: DECODES requests decode DECODED_TOKENS tokens together; PREFILLS prompts of PREFILL_TOKENS follow one another. Chosen.
DECODES, DECODED_TOKENS, PREFILLS, PREFILL_TOKENS = 8, 300, 100, 128
EQUAL_DECODES = [Ask(prompt=text(16, "equal", n), max_tokens=DECODED_TOKENS) for n in range(DECODES)]
EQUAL_PREFILLS = [Ask(prompt=text(PREFILL_TOKENS, "equal", n), max_tokens=1) for n in range(PREFILLS)]
EQUAL_COPIES, COPIED_BLOCKS = 200, 8


def measure(
    traffic: Traffic,
    profile_dir: Path,
    folder: Path,
    seconds: float,
    num_tight: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the errors. traffic: of the base model. profile_dir: where `overture profile` has kept its tables. folder: for the engine's files.

    seconds: of the traffic. num_tight: requests of tight memory.
    """
    settings = Settings.of(
        ModelShape(),
        folder,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        host_gib=KV_HOST_GIB,
        disk_gib=0,
        profile_dir=str(profile_dir),
    )
    with Worker("predictors", "ours", settings, folder) as worker:
        worker.wait_ready()

        def play(asks: Sequence[Ask], policy: str, history: Any, **use: Any) -> tuple[float, dict[str, Any]]:
            """Return the seconds until all are answered, and the predictions."""
            worker.call("empty")
            worker.call("use", policy=policy, history=history, rate_per_s=TIGHT_RATE_PER_S, **use)
            elapsed_s = max(answer.token_s[-1] for answer in worker.play(asks))
            return elapsed_s, worker.call("predictions")

        # While host memory has room.
        copies = worker.call("equal_copies", num_blocks=COPIED_BLOCKS, num=EQUAL_COPIES)
        noise = {name: _over_median(took_s[1:]) for name, took_s in copies.items()}
        worker.call("note_predictions")
        elapsed_s, _ = play(traffic.burst(BURST, "predictors"), DEFAULT_POLICY, traffic.history)
        per_s = BURST / elapsed_s
        say(f"{per_s:.2f} requests/s when all are there at once")
        asks = traffic.asks(SHARE * per_s, seconds, "predictors")
        _, trace = play(asks, DEFAULT_POLICY, traffic.history)
        _, tight = play(tight_asks(num_tight, "predictors"), "fcfs", tight_history(), way="swap")
        _, equal = play(EQUAL_DECODES, DEFAULT_POLICY, traffic.history)
        worker.play(EQUAL_PREFILLS, one_by_one=True)
        noise["step"] = _step_noise(equal["step"], worker.call("predictions")["step"])
    return _errors(trace, tight) | {"noise": noise}


def _errors(*plays: dict[str, Any]) -> dict[str, Any]:
    kinds = {name: [each for seen in plays for each in seen[name]] for name in ("step", "out", "back")}
    errors = {name: error_of(seen) for name, seen in kinds.items() if seen}
    copied = [name for name in ("out", "back") if name in errors]
    return {
        "step_error": errors["step"]["mean"],
        "swap_error": max(errors[name]["mean"] for name in copied),
        "swap_error_fitted": max(fitted_error(kinds[name]) for name in copied),
        "predicted": errors,
    }


def _step_noise(decoded: list[Any], prefilled: list[Any]) -> list[float]:
    """Return the times of equal steps over their median, in order: decodes, without the part that grows with their context, and prompts."""
    steps = [each for each in decoded if each[2:4] == [0, DECODES]]
    took, context = np.array([each[1] for each in steps]), np.array([each[4] for each in steps])
    slope, start = np.polyfit(context, took, 1)
    took_s = [each[1] for each in prefilled if each[2] == PREFILL_TOKENS]
    return _over_median((took / (start + slope * context)).tolist()) + _over_median(took_s[1:])


def _over_median(values: Sequence[float]) -> list[float]:
    middle = statistics.median(values)
    return [round(value / middle, 3) for value in values]
