"""What the engines of the adapters' bench have in common: settings, requests that come at their times, and when each of their tokens came."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.live.peers.engine import Settings

WARM_UP_TOKENS = (64, 512)


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    """adapters: (name, PEFT folder) pairs. max_loras: adapters in one step. The last two bound host memory: ours in bytes, vLLM's by count."""

    adapters: list[tuple[str, str]]
    max_loras: int
    max_lora_rank: int
    host_bytes: int
    max_cpu_loras: int


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. at_s: seconds after the play's start; adapter: None for the base model; is_background: it ends when the others have ended."""

    at_s: float
    prompt: list[int]
    max_tokens: int
    adapter: str | None = None
    is_background: bool = False


@dataclass(kw_only=True)
class Answer:
    """ttft_s: from when the request was due until its first token was there. token_s: ends of the steps that gave its tokens, after the start."""

    ttft_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)


class StepLog:
    """When each request's tokens came, by the ends of the engine's steps. Written by whoever steps the engine.

    name_of: the caller's id of a request, from the engine's.
    """

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self._name_of = name_of
        self._token_s: dict[str, list[float]] = {}

    def note(self, outputs: Iterable[Any]) -> None:
        """A step has ended with these outputs of requests that give deltas."""
        now_s = time.perf_counter()
        for output in outputs:
            num_tokens = len(output.outputs[0].token_ids)
            self._token_s.setdefault(self._name_of(output.request_id), []).extend([now_s] * num_tokens)

    def take(self, request_id: str, started_s: float) -> list[float]:
        """The times of this request's tokens, in seconds after `started_s`. They are forgotten."""
        return [at_s - started_s for at_s in self._token_s.pop(request_id, ())]


def warm_up_asks() -> list[Ask]:
    return [Ask(at_s=0.0, prompt=[1] * num_tokens, max_tokens=2) for num_tokens in WARM_UP_TOKENS]


def asks_of(requests: Iterable[dict[str, Any]]) -> list[Ask]:
    return [Ask(**request) for request in requests]


def as_dicts(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    return [answer.__dict__ for answer in answers]


def forget_files(folders: Iterable[str]) -> None:
    """Have the kernel forget these adapters: the next load is the disk's. They were written out long ago; what a process maps stays."""
    for path in (path for folder in folders for path in Path(folder).iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def account(found: Counter[str], num_loads: int, num_bytes: int) -> dict[str, Any]:
    """found: requests by where their adapter was when they came. Loads from disk, and their bytes."""
    return {"found": dict(found), "loads": num_loads, "bytes_moved": num_bytes}
