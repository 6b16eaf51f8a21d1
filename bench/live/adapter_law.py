"""A hundred adapters, which of them requests ask for, and how long requests are: the same law in all live benches."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.live.models import ModelShape, adapter_folders, model_folder
from bench.live.peers.adapters import AdapterSettings
from bench.live.peers.engine import drop_page_cache

RANKS = (8, 16, 32, 64, 128)
ADAPTERS_PER_RANK = 20
HOST_SHARE = 0.2
# Percentiles of Azure's conversation trace of 2023 (19,366 requests; Patel et al., ISCA 2024; CC-BY-4.0), in tokens; between them straight lines.
PROMPT_PERCENTILES = {0: 2, 5: 181, 10: 207, 20: 387, 30: 403, 40: 703, 50: 1020, 60: 1071, 70: 1130} | {
    80: 1315,
    90: 2735,
    95: 4083,
    99: 4142,
    100: 14050,
}
ANSWER_PERCENTILES = {0: 7, 5: 41, 10: 54, 20: 77, 30: 91, 40: 103, 50: 129, 60: 177, 70: 384, 80: 400} | {
    90: 424,
    95: 451,
    99: 601,
    100: 1000,
}


class Adapters:
    """The adapters' names, folders and sizes."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        ranks = [rank for rank in RANKS for _ in range(ADAPTERS_PER_RANK)]
        folders = adapter_folders(shape, ranks)
        drop_page_cache([path for folder in folders for path in folder.iterdir()])  # also writes them out
        self.folders = {folder.name: str(folder) for folder in folders}
        self.num_bytes = {
            folder.name: shape.adapter_bytes(rank) for folder, rank in zip(folders, ranks, strict=True)
        }
        self.of_rank: dict[int, list[str]] = defaultdict(list)
        for folder, rank in zip(folders, ranks, strict=True):
            self.of_rank[rank].append(folder.name)

    @property
    def host_bytes(self) -> int:
        return int(sum(self.num_bytes.values()) * HOST_SHARE)

    def settings(self, folder: Path, **more: Any) -> AdapterSettings:
        """Of an engine that serves them; `folder` is its own."""
        return AdapterSettings(
            model=str(model_folder(self.shape)),
            dtype=self.shape.dtype,
            folder=str(folder),
            adapters=list(self.folders.items()),
            max_lora_rank=max(RANKS),
            host_bytes=self.host_bytes,
            **more,
        )

    def drawn(self, chance: random.Random) -> str:
        """By Chameleon's law: a power law over ranks, small ones asked for most, uniform within a rank."""
        rank = chance.choices(RANKS, [1 / (1 + place) for place in range(len(RANKS))])[0]
        return chance.choice(self.of_rank[rank])


def drawn(percentiles: dict[int, int], chance: random.Random) -> float:
    """A number of tokens with this distribution, in straight lines between its points."""
    share = chance.random() * 100
    points = sorted(percentiles.items())
    (low, at_low), (high, at_high) = next(pair for pair in pairwise(points) if share <= pair[1][0])
    return at_low + (at_high - at_low) * (share - low) / (high - low)
