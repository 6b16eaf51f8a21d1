"""What our server's KV tiers and advisories are worth on a GPU, as a client sees it over HTTP.

The model has the layers of Llama 3 8B in bfloat16 and weights that vLLM makes up, so nothing is downloaded; its answers hardly depend on the prompt.

Each history of 2,048, 8,192 and 16,384 tokens is sent once (`recompute`); then a turn of 32 tokens follows it, whose KV is on the device, in host
memory (the others have pushed it out since), in host memory with an advisory before it, on disk (the server was started anew), and on disk with an
advisory. The device has room for four tenths of the histories. A history's turns have the same text, so their answers must be the same.

Found are `ttft_ms`, median by source and tokens (`device`: at once after the history, while its KV is still being saved; `resident`:
the same turn once more, later); `host_vs_recompute`, `advised_vs_resident` (from host memory) and so on, by tokens; `restored_share`: of a turn's
prompt, what was taken from KV; `copy_gb_s`: what the links give to plain copies of pinned memory; `restore_gb_s`: bytes of a history over what its
restore from host memory adds to the TTFT, `restore_vs_link` the longest one's over what the link gives.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from bench.live.peers.play import text
from bench.live.shared.asking import Streamed, streamed
from bench.live.shared.models import ModelShape, model_folder
from bench.live.shared.report import ROOT, Progress, last_line
from bench.live.shared.serving import OvertureServer
from engine_bridge.protocol.node import ADVISORY_ENDS

_shape = partial(ModelShape, max_model_len=17408, num_kv_heads=8, dtype="bfloat16")
_tiny = partial(
    _shape,
    num_layers=4,
    hidden_size=128,
    intermediate_size=256,
    num_heads=2,
    num_kv_heads=2,
    dtype="float32",
)
SHAPES = {
    "8b": _shape(num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32),
    "small": _shape(num_layers=16, hidden_size=2048, intermediate_size=4096, num_heads=16),
    "tiny": _tiny(),
    "dry": _tiny(max_model_len=1280),
}


class Histories(NamedTuple):
    """The histories that are played: their tokens, and how many there are of each length."""

    tokens: tuple[int, ...] = (2048, 8192, 16384)
    repeats: int = 3

    def all(self) -> list[tuple[int, int, str, list[int]]]:
        """Tokens, number, session and prompt of each."""
        return [
            (
                num_tokens,
                number,
                f"s{num_tokens}-{number}",
                text(num_tokens + 1, "history", num_tokens, number),
            )
            for number in range(self.repeats)
            for num_tokens in self.tokens
        ]


FIRST_SERVER = {
    "histories, and turns after each from the device": [("recompute", "device")],
    "turns from host memory": [("host",)],
    "turns from host memory with advisories": [("advised", "resident")],
}
SECOND_SERVER = {"turns from disk, each second one with an advisory": [("disk",), ("advised_disk",)]}
SOURCES = ("recompute", "device", "host", "advised", "resident", "disk", "advised_disk")
RATIOS = (
    *(("device", "resident"), ("host", "recompute"), ("disk", "recompute")),
    *(("advised", "host"), ("advised", "resident")),
    *(("advised_disk", "disk"), ("advised_disk", "resident")),
)
TURN_TOKENS, ANSWER_TOKENS = 32, 8
DEVICE_SHARE = 0.4
BLOCK_SIZE = 32
ADVISORY_TIMEOUT_S = 15.0
# Of a GPU, beside weights and KV: CUDA itself, a step's activations. A guess.
WORK_GIB = 2.5


class Client:
    """Asks one server."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def ask(self, session: str, prompt: list[int]) -> Streamed:
        """Ask with these token ids; return the answer. Raises RuntimeError if the server refuses or fails."""
        body = {"model": "bench", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        # Tokens of random weights may make no text.
        body |= {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        return await streamed(self._http, f"{self._url}/v1/completions", body, {"X-Session-Id": session})

    async def advise(self, session: str) -> None:
        """Send an advisory and wait until no more comes of it."""
        body = {"session_id": session, "model": "bench"}
        async with self._http.post(f"{self._url}/v1/advisories", json=body, raise_for_status=True) as reply:
            advisory: dict[str, Any] = await reply.json()
        path = f"{self._url}/v1/advisories/{advisory['id']}"
        deadline_s = time.monotonic() + ADVISORY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            async with self._http.get(path, raise_for_status=True) as reply:
                advisory = await reply.json()
            if advisory.get("tier") == "device" or advisory.get("state") in ADVISORY_ENDS:
                break
            await asyncio.sleep(0.05)


def kv_flags(shape: ModelShape, device: str, kv_gib: float) -> list[str]:
    """Return flags for a device with about `kv_gib` of KV.

    A GPU is told its share of memory, which includes weights and the working space of steps.
    """
    if device == "cpu":
        return [f"--kv-cache-gib={kv_gib}"]
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total_gib = (
        int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    )
    weights = shape.num_layers * sum(num_in * num_out for num_in, num_out in shape.linears.values())
    needed_gib = 2 * weights / 2**30 + WORK_GIB + kv_gib
    return [f"--gpu-memory-utilization={needed_gib / total_gib:.4f}"]


@asynccontextmanager
async def serving(
    shape: ModelShape, device: str, histories: Histories, folder: Path, log: Path
) -> AsyncIterator[Client]:
    """Serve this model on "cpu" or "cuda" with tiers that have room for all histories; yield a client until the block ends.

    folder: the server's data folder. log: the file for its output.
    """
    has_weights = shape != SHAPES["8b"]
    kv_gib = histories.repeats * sum(histories.tokens) * shape.kv_token_bytes / 2**30
    command = [
        *(f"--device={device}", f"--data-dir={folder}"),
        f"--model={model_folder(shape, has_weights=has_weights)}",
        *("--served-model-name=bench", f"--dtype={shape.dtype}", f"--max-model-len={shape.max_model_len}"),
        *(f"--block-size={BLOCK_SIZE}", "--max-lora-rank=64", "--max-loras=4"),
        *kv_flags(shape, device, DEVICE_SHARE * kv_gib),
        *([] if has_weights else ["--engine-arg=load_format=dummy"]),
        *(f"--kv-host-gib={1.5 * kv_gib:.4f}", f"--kv-disk-gib={2 * kv_gib:.4f}"),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with OvertureServer(log, *command, PYTHONPATH=path) as server:
        server.wait(server.is_ready, timeout_s=150)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
            yield Client(server.url, http)


class Played:
    """TTFTs, cached shares and answers of the turns, by source and length of history."""

    def __init__(self) -> None:
        self.ttft_s: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.cached: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.answers: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)

    def note(self, source: str, num_tokens: int, number: int, answer: Streamed) -> None:
        """Note one answer."""
        self.ttft_s[source, num_tokens].append(answer.ttft_s)
        self.cached[source, num_tokens].append(answer.num_cached / (num_tokens + 1 + TURN_TOKENS))
        if source != "recompute":
            self.answers[num_tokens, number][source] = str(answer.token_ids)

    def ms(self, source: str) -> dict[int, float]:
        """Median TTFT by history."""
        return {
            num_tokens: round(1e3 * statistics.median(found), 2)
            for (of, num_tokens), found in self.ttft_s.items()
            if of == source
        }

    def ratio(self, source: str, to: str) -> dict[int, float]:
        """Return the medians of one source over those of another, by length of history."""
        theirs = self.ms(to)
        return {num_tokens: round(ms / theirs[num_tokens], 3) for num_tokens, ms in self.ms(source).items()}

    def are_identical(self) -> bool:
        """Return whether each turn was answered from every source as from the device."""
        return all(len(set(answers.values())) == 1 for answers in self.answers.values())


def turn_of(prompt: list[int]) -> list[int]:
    """Return a prompt that continues this history."""
    return prompt + text(TURN_TOKENS, "turn", prompt[0])


async def play(
    client: Client,
    played: Played,
    histories: Histories,
    progress: Progress,
    rounds: Mapping[str, Sequence[Sequence[str]]],
) -> None:
    """Ask all histories in each round, by its name, from these sources, which take turns."""
    for number in range(3):
        await client.ask(f"w{number}", text(min(3000, histories.tokens[-1]), "warm", number))  # not counted
    for said, turns in rounds.items():
        progress.say(said)
        for at, (num_tokens, number, session, prompt) in enumerate(histories.all()):
            for source in turns[at % len(turns)]:
                if source.startswith("advised"):
                    await client.advise(session)
                asked = prompt if source == "recompute" else turn_of(prompt)
                played.note(source, num_tokens, number, await client.ask(session, asked))


async def measure(name: str, device: str, histories: Histories) -> dict[str, Any]:
    """Return the figures. name: of the shape."""
    shape, progress, played = SHAPES[name], Progress(), Played()
    copies = last_line(sys.executable, "-m", "bench.live.gpu.copies", f"--device={device}", timeout_s=300)
    details: dict[str, Any] = {"shape": name, "copy_gb_s": copies["one_stretch"]}
    with tempfile.TemporaryDirectory() as scratch:
        folder, logs = Path(scratch) / "data", Path(scratch)
        for log, rounds in (("first.log", FIRST_SERVER), ("second.log", SECOND_SERVER)):
            progress.say("starting a server")
            async with serving(shape, device, histories, folder, logs / log) as client:
                await play(client, played, histories, progress, rounds)
    link_gb_s = details["copy_gb_s"]["to_device"]
    restore_gb_s = {
        num_tokens: round(num_tokens * shape.kv_token_bytes / max(ms - resident_ms, 0.1) / 1e6, 1)
        for (num_tokens, ms), resident_ms in zip(
            played.ms("host").items(), played.ms("resident").values(), strict=True
        )
    }
    details |= {f"{source}_vs_{to}": played.ratio(source, to) for source, to in RATIOS}
    details |= {
        "ttft_ms": {source: played.ms(source) for source in SOURCES},
        "restored_share": {
            f"{source} {num_tokens}": round(statistics.mean(found), 3)
            for (source, num_tokens), found in played.cached.items()
        },
        "restore_gb_s": restore_gb_s,
        "restore_vs_link": round(restore_gb_s[histories.tokens[-1]] / link_gb_s, 3),
        "tokens_identical": played.are_identical(),
        "num_distinct_answers": len({answers["device"] for answers in played.answers.values()}),
    }
    return details
