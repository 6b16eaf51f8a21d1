"""What our server's KV tiers, advisories and adapters are worth on a GPU, as a client sees it over HTTP.

    python -m bench.live.gpu [--shape 8b|small|tiny] [--eager] [--device cpu] [--logs FOLDER]

`8b` has the layers of Llama 3 8B in bfloat16 and weights that vLLM makes up, so nothing is downloaded; its answers hardly depend on the prompt.
`small` (0.6 B) has random weights that make them differ, so that a wrong KV block shows as a wrong token: `tokens_identical`.

Each history of 2,048, 8,192 and 16,384 tokens is sent once (`recompute`); then a turn of 32 tokens follows it, whose KV is on the device, in host
memory (the others have pushed it out since), in host memory with an advisory before it, on disk (the server was started anew), and on disk with an
advisory. The device has room for four tenths of the histories. A history's turns have the same text, so their answers must be the same.

The last line is JSON: `ttft_ms`, median by source and tokens (`device`: at once after the history, while its KV is still being saved; `resident`:
the same turn once more, later); `host_vs_recompute`, `advised_vs_resident` (from host memory) and so on, by tokens; `restored_share`: of a turn's
prompt, what was taken from KV; `copy_gb_s`: what the links give to plain copies of pinned memory; `restore_gb_s`: bytes of a history over what its
restore from host memory adds to the TTFT, `restore_vs_link` the longest one's over what the link gives; `cold_adapter_ms`, `warm_adapter_ms`,
`base_ms`: TTFT of an adapter's first request, its next, and the base model's. The first adapter of all has kernels compiled.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.live.models import ModelShape, adapter_folders, model_folder
from bench.live.peers.play import text
from bench.live.report import ROOT, Progress, options, report, spread
from bench.live.serving import ServerProcess
from bench.live.soak.server import HOST, free_port
from engine_bridge.protocol.node import ADVISORY_ENDS

_shape = partial(ModelShape, max_model_len=17408, num_kv_heads=8, dtype="bfloat16")
SHAPES = {
    "8b": _shape(num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32),
    "small": _shape(num_layers=16, hidden_size=2048, intermediate_size=4096, num_heads=16),
    "tiny": _shape(
        num_layers=4, hidden_size=128, intermediate_size=256, num_heads=2, num_kv_heads=2, dtype="float32"
    ),
}
HISTORY_TOKENS = (2048, 8192, 16384)
REPEATS = 3
SOURCES = ("recompute", "device", "host", "advised", "resident", "disk", "advised_disk")
TURN_TOKENS, ANSWER_TOKENS = 32, 8
DEVICE_SHARE = 0.4
BLOCK_SIZE = 32
ADAPTER_RANKS = (64, 64, 64)
ADVISORY_TIMEOUT_S = 15.0
# Of a GPU, beside weights and KV: CUDA itself, LoRA slots, a step's activations. A guess.
WORK_GIB = 2.5


class Answer(NamedTuple):
    """`tpot_s`: of the tokens after the first."""

    ttft_s: float
    tpot_s: float
    text: str
    cached_tokens: int


class Client:
    """Of one server."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])

    def ask(self, session: str, prompt: list[int], model: str = "bench") -> Answer:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(HOST, self._port, timeout=60)
        started_s = time.perf_counter()
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body),
            {"Content-Type": "application/json", "X-Session-Id": session},
        )
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {reply.read()[:500]!r}")
        ttft_s, last_s, answer, cached = 0.0, 0.0, "", 0
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                last_s = time.perf_counter() - started_s
                ttft_s = ttft_s or last_s
                answer += choice.get("text") or ""
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(ttft_s, (last_s - ttft_s) / (ANSWER_TOKENS - 1), answer, cached)

    def advise(self, session: str) -> dict[str, Any]:
        """Send an advisory and wait until no more comes of it."""
        advisory = self._json("POST", "/v1/advisories", {"session_id": session, "model": "bench"})
        deadline_s, states = time.monotonic() + ADVISORY_TIMEOUT_S, []
        while time.monotonic() < deadline_s:
            advisory = self._json("GET", f"/v1/advisories/{advisory['id']}")
            states.append((advisory.get("state"), advisory.get("device_tokens"), advisory.get("tier")))
            if advisory.get("tier") == "device" or advisory.get("state") in ADVISORY_ENDS:
                break
            time.sleep(0.05)
        return advisory | {"states": [states[0], states[-1]] if states else []}

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self._text(method, path, body))

    def _text(self, method: str, path: str, body: Any = None) -> str:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=60)
        data = json.dumps(body) if body is not None else None
        connection.request(method, path, data, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        found = reply.read().decode()
        if reply.status >= 400:
            raise RuntimeError(f"{path}: {reply.status}: {found[:500]}")
        return found


def kv_flags(shape: ModelShape, device: str, kv_gib: float) -> list[str]:
    """For a device with so much KV, about: a GPU is told its share of memory, with weights and what steps work with."""
    if device == "cpu":
        return [f"--kv-cache-gib={kv_gib}"]
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total_gib = (
        int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    )
    weights = shape.num_layers * sum(num_in * num_out for num_in, num_out in shape.linears.values())
    needed_gib = 2 * weights / 2**30 + WORK_GIB + kv_gib
    return [f"--gpu-memory-utilization={needed_gib / total_gib:.4f}"]


@contextmanager
def serving(shape: ModelShape, device: str, folder: Path, log: Path, *flags: str) -> Iterator[Client]:
    """A client of `overture serve` with this model, its adapters and tiers for all histories, until the block ends.

    folder: of the server's data. log: for what it prints.
    """
    has_weights = shape != SHAPES["8b"]
    history_tokens = REPEATS * sum(HISTORY_TOKENS)
    kv_gib = history_tokens * shape.kv_token_bytes / 2**30
    adapters = adapter_folders(shape, ADAPTER_RANKS)
    port = free_port()
    command = [
        *(sys.executable, "-m", "gateway.cli", "serve", f"--device={device}", f"--port={port}"),
        *(f"--data-dir={folder}", f"--model={model_folder(shape, has_weights=has_weights)}"),
        *("--served-model-name=bench", f"--dtype={shape.dtype}", f"--max-model-len={shape.max_model_len}"),
        *(f"--block-size={BLOCK_SIZE}", "--max-lora-rank=64", "--max-loras=4"),
        *(f"--lora-module={adapter.name}={adapter}" for adapter in adapters),
        *kv_flags(shape, device, DEVICE_SHARE * kv_gib),
        *([] if has_weights else ["--engine-arg=load_format=dummy"]),
        *(f"--kv-host-gib={1.5 * kv_gib:.1f}", f"--kv-disk-gib={2 * kv_gib:.1f}"),
        *flags,
    ]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    }
    with ServerProcess(command, port, log, ROOT, environ) as server:
        server.wait(server.is_ready, timeout_s=150)
        yield Client(server.url)


class Played:
    """What the turns gave, by source and length of history."""

    def __init__(self) -> None:
        self.ttft_s: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.cached: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.tpot_s: list[float] = []
        self.answers: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)

    def note(self, source: str, num_tokens: int, number: int, answer: Answer) -> None:
        self.ttft_s[source, num_tokens].append(answer.ttft_s)
        self.cached[source, num_tokens].append(answer.cached_tokens / (num_tokens + 1 + TURN_TOKENS))
        self.tpot_s.append(answer.tpot_s)
        if source != "recompute":
            self.answers[num_tokens, number][source] = answer.text

    def ms(self, source: str) -> dict[int, float]:
        """Median TTFT by history."""
        return {
            num_tokens: round(1e3 * statistics.median(found), 2)
            for (of, num_tokens), found in self.ttft_s.items()
            if of == source
        }

    def ratio(self, source: str, to: str) -> dict[int, float]:
        theirs = self.ms(to)
        return {num_tokens: round(ms / theirs[num_tokens], 3) for num_tokens, ms in self.ms(source).items()}

    def different(self) -> list[str]:
        """Turns that were answered otherwise than from the device."""
        return [
            f"{num_tokens} #{number} {source}"
            for (num_tokens, number), answers in self.answers.items()
            for source, answer in answers.items()
            if answer != answers["device"]
        ]


def histories() -> list[tuple[int, int, str, list[int]]]:
    """Tokens, number, session and prompt of each."""
    return [
        (num_tokens, number, f"s{num_tokens}-{number}", text(num_tokens + 1, "history", num_tokens, number))
        for number in range(REPEATS)
        for num_tokens in HISTORY_TOKENS
    ]


def turn_of(prompt: list[int]) -> list[int]:
    return prompt + text(TURN_TOKENS, "turn", prompt[0])


def warm_up(client: Client) -> None:
    for number in range(3):
        client.ask(f"w{number}", text(3000, "warm", number))


def play_first_server(client: Client, played: Played, progress: Progress) -> list[Any]:
    """Everything up to the restart. Returns what became of advisories."""
    warm_up(client)
    progress.say("histories, and turns after each from the device")
    for num_tokens, number, session, prompt in histories():
        played.note("recompute", num_tokens, number, client.ask(session, prompt))
        played.note("device", num_tokens, number, client.ask(session, turn_of(prompt)))
    progress.say("turns from host memory")
    for num_tokens, number, session, prompt in histories():
        played.note("host", num_tokens, number, client.ask(session, turn_of(prompt)))
    progress.say("turns from host memory with advisories")
    advisories = []
    for num_tokens, number, session, prompt in histories():
        advisories.append(client.advise(session))
        played.note("advised", num_tokens, number, client.ask(session, turn_of(prompt)))
        played.note("resident", num_tokens, number, client.ask(session, turn_of(prompt)))
    return advisories


def play_second_server(client: Client, played: Played, progress: Progress) -> list[Any]:
    warm_up(client)
    progress.say("turns from disk, each second one with an advisory")
    advisories = []
    for at, (num_tokens, number, session, prompt) in enumerate(histories()):
        source = "disk" if at % 2 == 0 else "advised_disk"
        if source == "advised_disk":
            advisories.append(client.advise(session))
        played.note(source, num_tokens, number, client.ask(session, turn_of(prompt)))
    return advisories


def adapter_times(client: Client, adapters: Sequence[str]) -> dict[str, list[float]]:
    """TTFT in ms of an adapter's first request and of its next, and of the base model."""
    found: dict[str, list[float]] = {"cold_adapter_ms": [], "warm_adapter_ms": [], "base_ms": []}
    for number, adapter in enumerate(adapters):
        models = {"base_ms": "bench", "cold_adapter_ms": adapter, "warm_adapter_ms": adapter}
        for name, model in models.items():
            answer = client.ask(f"a{number}{name}", text(200, "adapter", number, name), model)
            found[name].append(round(1e3 * answer.ttft_s, 2))
    return found


def copy_gb_s() -> dict[str, float]:
    """Of plain copies between pinned memory and the GPU, in a process of their own."""
    code = """
import json, torch
a = torch.empty(1 << 30, dtype=torch.uint8).pin_memory(); b = torch.empty_like(a, device="cuda"); found = {}
for name, to, of in (("to_device", b, a), ("to_host", a, b)):
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(); to.copy_(of, non_blocking=True); end.record(); torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    found[name] = round(a.numel() / sorted(times)[2] / 1e6, 1)
print(json.dumps(found | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="which model")
    parser.add_argument("--eager", action="store_true", help="compile nothing: the server starts sooner")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the bench itself"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for what the two servers print; otherwise it is not kept"
    )
    args = parser.parse_args()
    shape, progress, played = SHAPES[args.shape], Progress(), Played()
    flags = ["--enforce-eager"] if args.eager else []
    details: dict[str, Any] = {"shape": args.shape, "copy_gb_s": copy_gb_s() if args.device == "cuda" else {}}
    with tempfile.TemporaryDirectory() as name:
        folder, logs = Path(name) / "data", args.logs or Path(name)
        progress.say("starting the server")
        with serving(shape, args.device, folder, logs / "first.log", *flags) as client:
            progress.say("ready")
            details["advisories"] = play_first_server(client, played, progress)
            details |= adapter_times(client, [each.name for each in adapter_folders(shape, ADAPTER_RANKS)])
        progress.say("starting it anew")
        with serving(shape, args.device, folder, logs / "second.log", *flags) as client:
            details["disk_advisories"] = play_second_server(client, played, progress)
    resident_ms, link_gb_s = played.ms("resident"), details["copy_gb_s"].get("to_device")
    restore_gb_s = {
        num_tokens: round(num_tokens * shape.kv_token_bytes / max(ms - resident_ms[num_tokens], 0.1) / 1e6, 1)
        for num_tokens, ms in played.ms("host").items()
    }
    rows = [
        (f"TTFT, {source}, {num_tokens} tokens [ms]", spread([1e3 * each for each in found]), "")
        for (source, num_tokens), found in sorted(played.ttft_s.items())
    ]
    report(
        f"{args.shape} on {details['copy_gb_s'].get('gpu', args.device)}",
        rows,
        details
        | {
            "ttft_ms": {source: played.ms(source) for source in SOURCES},
            "restored_share": {
                f"{source} {num_tokens}": round(statistics.mean(found), 3)
                for (source, num_tokens), found in played.cached.items()
            },
            "host_vs_recompute": played.ratio("host", "recompute"),
            "disk_vs_recompute": played.ratio("disk", "recompute"),
            "advised_vs_host": played.ratio("advised", "host"),
            "advised_vs_resident": played.ratio("advised", "resident"),
            "advised_disk_vs_disk": played.ratio("advised_disk", "disk"),
            "advised_disk_vs_resident": played.ratio("advised_disk", "resident"),
            "restore_gb_s": restore_gb_s,
            "restore_vs_link": round(restore_gb_s[HISTORY_TOKENS[-1]] / link_gb_s, 3) if link_gb_s else None,
            "tpot_ms": round(1e3 * statistics.median(played.tpot_s), 2),
            "tokens_identical": not played.different(),
            "different": played.different(),
            "num_distinct_answers": len({answers["device"] for answers in played.answers.values()}),
        },
    )


if __name__ == "__main__":
    main()
