"""What the engines of the adapters' bench have in common: settings, requests that come at their times, and when each of their tokens came."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.live.peers.engine import Settings, drop_page_cache

WARM_UP_TOKENS = (64, 512)


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    """adapters: (name, PEFT folder) pairs; without any, LoRA is off. max_loras: adapters in one step.

    host_bytes, max_cpu_loras: bound the adapters' host memory, ours in bytes, vLLM's by count. kv_host_bytes: for KV, ours only.
    profile_dir: where `overture profile` keeps what it measured, ours only; "" for none.
    """

    adapters: list[tuple[str, str]] = field(default_factory=list)
    max_loras: int = 1
    max_lora_rank: int = 8
    host_bytes: int = 0
    max_cpu_loras: int = 1
    kv_host_bytes: int = 0
    profile_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. at_s: seconds after the play's start; adapter: None for the base model; is_background: it ends when the others have ended.

    priority: lower first, where the engine's policy asks for it.
    """

    at_s: float
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    is_background: bool = False
    priority: int = 0


@dataclass(kw_only=True)
class Answer:
    """ttft_s: from when the request was due until its first token was there. token_s: ends of the steps that gave its tokens, after the start.

    started_s: begin of the step in which it first ran, after the start.
    """

    ttft_s: float = 0.0
    started_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)


class StepLog:
    """When each request first ran and when its tokens came, by the engine's steps. Written by whoever steps the engine.

    Args:
        scheduler: vLLM's; its requests' ids are those of the outputs, and something behind a dash.
        name_of: the caller's id of a request, from an output's.
    """

    def __init__(self, scheduler: Any, name_of: Callable[[str], str] = str) -> None:
        self._scheduler = scheduler
        self._name_of = name_of
        self._token_s: dict[str, list[float]] = {}
        self._started_s: dict[str, float] = {}

    def step(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Have `run` do a step, and note what came of it: outputs of requests that give deltas."""
        began_s = time.perf_counter()
        outputs = run()
        ended_s = time.perf_counter()
        for request in self._scheduler.running:
            self._started_s.setdefault(self._name_of(request.request_id.rpartition("-")[0]), began_s)
        for output in outputs:
            name = self._name_of(output.request_id)
            self._started_s.setdefault(name, began_s)
            num_tokens = len(output.outputs[0].token_ids)
            self._token_s.setdefault(name, []).extend([ended_s] * num_tokens)
        return outputs

    def take(self, request_id: str, answer: Answer, zero_s: float) -> None:
        """Write this request's times on its answer, in seconds after `zero_s`. They are forgotten."""
        answer.token_s = [at_s - zero_s for at_s in self._token_s.pop(request_id, ())]
        answer.started_s = self._started_s.pop(request_id, zero_s) - zero_s


def warm_up_asks() -> list[Ask]:
    return [Ask(at_s=0.0, prompt=[1] * num_tokens, max_tokens=2) for num_tokens in WARM_UP_TOKENS]


def asks_of(requests: Iterable[dict[str, Any]]) -> list[Ask]:
    return [Ask(**request) for request in requests]


def as_dicts(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    return [answer.__dict__ for answer in answers]


def forget_files(folders: Iterable[str]) -> None:
    """Have the kernel forget these adapters: the next load is the disk's. They were written out long ago; what a process maps stays."""
    drop_page_cache([path for folder in folders for path in Path(folder).iterdir()], is_written=True)


def account(found: Counter[str], num_loads: int, num_bytes: int) -> dict[str, Any]:
    """found: requests by where their adapter was when they came. Loads from disk, and their bytes."""
    return {"found": dict(found), "loads": num_loads, "bytes_moved": num_bytes}
