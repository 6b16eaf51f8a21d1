"""How far off the predictions of steps and copies are in our node, each made just before it is seen, by the tables that serve and learn.

The node starts with `overture profile`'s tables. After a burst that it learns from, requests with the trace's lengths come at SHARE of what it
answers, then those of tight memory (always swapped). `step_error`, `swap_error`: mean relative error over all steps of both; of copies each way, the
worse of both ways. `swap_error_fitted`: of one set-up time and one bandwidth each way, fitted to the same copies afterwards. What equal steps and
copies of this engine differ by, in their order (`noise`), is what the emulated device's differ by, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.live.models import ModelShape, model_folder
from bench.live.peers.adapters import AdapterSettings, Ask
from bench.live.peers.client import Worker
from bench.live.peers.play import text
from bench.live.scheduling_traffic import (
    HISTORY,
    TIGHT_RATE_PER_S,
    BaseModelOnly,
    Traffic,
    lengths_of_trace,
    tight_asks,
)
from bench.predicting import error_of, fitted_error
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

NUM_BLOCKS, MAX_MODEL_LEN, KV_HOST_BYTES = 128, 2048, 1 << 30
BURST, SHARE = 48, 0.8
# Of equal steps: so many requests that decode so many tokens at once, and prompts of so many tokens, one after the other. Chosen.
DECODES, DECODED_TOKENS, PREFILLS, PREFILL_TOKENS = 8, 300, 100, 128
EQUAL_COPIES, COPIED_BLOCKS = 200, 8


def measure(
    profile_dir: Path, folder: Path, seconds: float, num_tight: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """seconds: of requests with the trace's lengths. num_tight: requests of tight memory."""
    shape, traffic = ModelShape(), Traffic(lengths_of_trace(), BaseModelOnly())  # type: ignore[arg-type]
    settings = AdapterSettings(
        model=str(model_folder(shape)),
        dtype=shape.dtype,
        folder=str(folder),
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        kv_host_bytes=KV_HOST_BYTES,
        profile_dir=str(profile_dir),
    )
    with Worker("scheduling_ours", settings, folder) as worker:
        worker.wait_ready()
        # While host memory has room.
        copies = worker.call("equal_copies", num_blocks=COPIED_BLOCKS, num=EQUAL_COPIES)
        noise = {name: _over_median(took_s[1:]) for name, took_s in copies.items()}
        worker.call("note_predictions")
        burst = traffic.burst(BURST, "predictors")
        per_s = BURST / _play(worker, burst, DEFAULT_POLICY, traffic.history)
        learned = worker.call("predictions")
        say(f"{per_s:.2f} requests/s when all are there at once; {_said(learned)} in that burst")
        plays = {}
        _play(worker, traffic.asks(SHARE * per_s, seconds, "predictors"), DEFAULT_POLICY, traffic.history)
        plays["trace"] = worker.call("predictions")
        say(f"the trace: {_said(plays['trace'])}")
        past = [[len(ask.prompt), ask.max_tokens, None] for ask in tight_asks(HISTORY, "history")]
        _play(worker, tight_asks(num_tight, "predictors"), "fcfs", past, way="swap")
        plays["tight"] = worker.call("predictions")
        say(f"tight memory: {_said(plays['tight'])}")
        noise["step"] = _step_noise(worker, traffic.history)
    return _result(plays) | {"noise": noise}


def _play(worker: Worker, asks: Sequence[Ask], policy: str, history: Any, **use: Any) -> float:
    """Seconds until all are answered."""
    worker.call("empty")
    worker.call("use", policy=policy, history=history, rate_per_s=TIGHT_RATE_PER_S, **use)
    answers = worker.call("play", requests=[asdict(ask) for ask in asks])
    return float(max(answer["token_s"][-1] for answer in answers))


def _said(seen: dict[str, Any]) -> str:
    return ", ".join(f"{name} off by {error_of(each)}" for name, each in seen.items() if each)


def _result(plays: dict[str, dict[str, Any]]) -> dict[str, Any]:
    kinds = {
        name: [each for seen in plays.values() for each in seen[name]] for name in ("step", "out", "back")
    }
    errors = {name: error_of(seen) for name, seen in kinds.items() if seen}
    return {
        "step_error": errors["step"]["mean"],
        "swap_error": max(errors[name]["mean"] for name in ("out", "back") if name in errors),
        "swap_error_fitted": max(fitted_error(kinds[name]) for name in ("out", "back") if kinds[name]),
        "predicted": errors
        | {
            f"{name}, {play}": error_of(seen[name])
            for play, seen in plays.items()
            for name in kinds
            if seen[name]
        },
    }


def _step_noise(worker: Worker, history: Any) -> list[float]:
    """What equal steps took over their median, in order: decodes, without what grows with their context, and prompts."""
    decodes = [
        Ask(at_s=0.0, prompt=text(16, "equal", number), max_tokens=DECODED_TOKENS)
        for number in range(DECODES)
    ]
    _play(worker, decodes, DEFAULT_POLICY, history)
    steps = [each for each in worker.call("predictions")["step"] if each[2:4] == [0, DECODES]]
    took, context = np.array([each[1] for each in steps]), np.array([each[4] for each in steps])
    slope, start = np.polyfit(context, took, 1)
    ratios = (took / (start + slope * context)).tolist()
    prefills = [Ask(at_s=0.0, prompt=text(PREFILL_TOKENS, "equal", n), max_tokens=1) for n in range(PREFILLS)]
    worker.call("play", requests=[asdict(ask) for ask in prefills], one_by_one=True)
    took_s = [each[1] for each in worker.call("predictions")["step"] if each[2] == PREFILL_TOKENS]
    return _over_median(ratios) + _over_median(took_s[1:])


def _over_median(values: Sequence[float]) -> list[float]:
    middle = statistics.median(values)
    return [round(value / middle, 3) for value in values]
