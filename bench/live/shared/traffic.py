"""A hundred adapters, which of them requests ask for, how long requests are and when they come: the same law in all live benches."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.emulated.core.traffic import RANKS, azure
from bench.live.peers.engine import Settings, drop_page_cache
from bench.live.peers.play import Ask, text
from bench.live.shared.models import ModelShape, adapter_folders

ADAPTERS_PER_RANK = 20
HOST_SHARE = 0.2
HISTORY = 2000
# Tight memory: answers that grow far beyond what the prompts let expect.
TIGHT_PROMPT_TOKENS, TIGHT_ANSWER_TOKENS, TIGHT_RATE_PER_S = (32, 128), (256, 512), 4.0


class Adapters:
    """The adapters' names, folders and sizes."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        ranks = [rank for rank in RANKS for _ in range(ADAPTERS_PER_RANK)]
        folders = adapter_folders(shape, ranks)
        drop_page_cache([path for folder in folders for path in folder.iterdir()])  # also writes them out
        self.folders = {folder.name: str(folder) for folder in folders}
        self.host_bytes = int(sum(map(shape.adapter_bytes, ranks)) * HOST_SHARE)
        self.of_rank: dict[int, list[str]] = defaultdict(list)
        for folder, rank in zip(folders, ranks, strict=True):
            self.of_rank[rank].append(folder.name)

    def settings(self, folder: Path, **more: Any) -> Settings:
        """Return the settings of an engine that serves these adapters and keeps its files in `folder`."""
        return Settings.of(
            self.shape,
            folder,
            adapters=list(self.folders.items()),
            max_lora_rank=max(RANKS),
            adapter_host_bytes=self.host_bytes,
            has_tiers=False,
            **more,
        )

    def drawn(self, chance: random.Random) -> str:
        """Return an adapter by Chameleon's law: a power law over ranks, small ones asked for most, uniform within a rank."""
        rank = chance.choices(RANKS, [1 / (1 + place) for place in range(len(RANKS))])[0]
        return chance.choice(self.of_rank[rank])


class Traffic:
    """Requests by the lengths of Azure's conversation trace divided by `scale` and Chameleon's law of adapters.

    Args:
        adapters: None for requests of the base model.
        scale: what lengths are divided by.

    Attributes:
        history: earlier requests, which engines may learn from.
    """

    def __init__(self, adapters: Adapters | None, scale: int) -> None:
        self._adapters = adapters
        chance = random.Random("history")
        lengths = list(azure().scaled(1 / scale).pairs)
        chance.shuffle(lengths)
        seen, self._lengths = lengths[:HISTORY], lengths[HISTORY:]
        self.history = [[prompt, answer, self._adapter(chance)] for prompt, answer in seen]

    def asks(self, rate_per_s: float, seconds: float, *seed: object) -> list[Ask]:
        """Poisson arrivals."""
        chance = random.Random(f"arrivals {seed}")
        asks: list[Ask] = []
        at_s = chance.expovariate(rate_per_s)
        while at_s < seconds:
            asks.append(self._ask(at_s, chance, len(asks), *seed))
            at_s += chance.expovariate(rate_per_s)
        return asks

    def warm_up(self, num: int, *seed: object) -> list[Ask]:
        """Short requests for adapters by the same law."""
        chance = random.Random(f"warm-up {seed}")
        return [
            Ask(prompt=text(4, "warm", number), max_tokens=1, adapter=self._adapter(chance))
            for number in range(num)
        ]

    def burst(self, num: int, *seed: object) -> list[Ask]:
        """Return requests that all arrive at once."""
        chance = random.Random(f"burst {seed}")
        return [self._ask(0.0, chance, number, "burst", *seed) for number in range(num)]

    def _adapter(self, chance: random.Random) -> str | None:
        return self._adapters.drawn(chance) if self._adapters is not None else None

    def _ask(self, at_s: float, chance: random.Random, number: int, *seed: object) -> Ask:
        num_prompt, num_answer = chance.choice(self._lengths)
        return Ask(
            at_s=at_s,
            prompt=text(num_prompt, "traffic", *seed, number),
            max_tokens=num_answer,
            adapter=self._adapter(chance),
        )


def tight_asks(num: int, *seed: object) -> list[Ask]:
    """Short prompts, long answers, faster than they can be answered."""
    chance = random.Random(f"tight {seed}")
    asks, at_s = [], 0.0
    for number in range(num):
        prompt = text(chance.randint(*TIGHT_PROMPT_TOKENS), "tight", *seed, number)
        asks.append(Ask(at_s=at_s, prompt=prompt, max_tokens=chance.randint(*TIGHT_ANSWER_TOKENS)))
        at_s += chance.expovariate(TIGHT_RATE_PER_S)
    return asks


def tight_history() -> list[list[Any]]:
    """Return earlier requests of tight memory, which engines may learn from."""
    return [[len(ask.prompt), ask.max_tokens, None] for ask in tight_asks(HISTORY, "history")]
