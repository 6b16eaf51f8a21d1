"""What layers with a window save: bytes and time of a restore, and device memory, against the same model with full attention.

    python -m bench.live.kv.windows [--quick]

Two engines of ours, each in a process of its own, taking turns. Both have twelve layers of one shape with random weights (class Olmo3); in one of
them ten layers see the last WINDOW_TOKENS tokens alone, as five of six do in Gemma 3. A prompt's KV is restored from host memory to an empty device,
and computed anew. The last line is JSON. `restored_bytes_share`, `restore_ttft_share`: with windows over without, by the prompt's tokens.
`tokens_per_byte_ratio`: of the device's KV memory, how many tokens of long prompts it holds for each byte, with windows over without.
`tokens_identical`: the answers from host memory are those of computing.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.live.correct.checkpoints import folder_of
from bench.live.correct.families import VOCAB_SIZE, Family
from bench.live.peers.engine import Settings
from bench.live.peers.play import text
from bench.live.peers.worker import Worker, start_workers
from bench.live.shared.report import Progress, options, report, spread
from bench.live.shared.rounds import in_turn

NUM_LAYERS, WINDOW_TOKENS, MAX_MODEL_LEN = 12, 512, 8192
PROMPT_TOKENS = (1024, 2048, 4096, 8000)
NUM_BLOCKS = {"full": 300, "windows": 900}  # each holds the longest prompt
ANSWER_TOKENS = 4
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW_TOKENS,
}
LAYERS = {
    "full": ["full_attention"] * NUM_LAYERS,
    "windows": (["sliding_attention"] * 5 + ["full_attention"]) * (NUM_LAYERS // 6),
}


def model(kind: str) -> str:
    """Return the folder of a kind's model, which is written at first use."""
    family = Family(
        name=f"olmo3-12-{kind}", config_class="Olmo3Config", config=_SHAPE | {"layer_types": LAYERS[kind]}
    )
    return str(folder_of(family))


class Bench(Progress):
    """The running engines, and the measurements on them, by kind and the prompt's tokens."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.workers = workers
        self.bytes: dict[tuple[str, int], int] = {}
        self.ttft_s: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        self.wrong: list[str] = []

    def measure(self, num_tokens: int, repeats: int) -> None:
        """Measure restores and computing of one prompt by both engines in turn."""
        for repeat in range(repeats):
            prompt = text(num_tokens, "windows", num_tokens, repeat)
            for kind in in_turn(tuple(self.workers), repeat):
                self._one(kind, prompt)
        times = {
            kind: [round(t * 1e3) for t in self.ttft_s[kind, "host", num_tokens]] for kind in self.workers
        }
        self.say(f"from host memory in ms: {times}")
        self.say(
            f"{num_tokens} tokens: {self.bytes['windows', num_tokens] / self.bytes['full', num_tokens]:.2f} of the bytes"
        )

    def _one(self, kind: str, prompt: list[int]) -> None:
        worker, num_tokens = self.workers[kind], len(prompt)
        answers = []
        for source in ("recompute", "host"):
            worker.call("place", source=source)
            before = worker.call("copied_bytes")
            result = worker.call("turn", tokens=prompt, max_tokens=ANSWER_TOKENS)
            if source == "host":
                self.bytes[kind, num_tokens] = worker.call("copied_bytes") - before
            worker.call("settle")
            self.ttft_s[kind, source, num_tokens].append(result["ttft_s"])
            answers.append(result["token_ids"])
        if answers[0] != answers[1]:
            self.wrong.append(f"{kind} {num_tokens}")


def bench(repeats: int) -> None:
    """Start the engines, measure and report."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-windows-")))
        arms = {}
        for kind in LAYERS:
            (folder / kind).mkdir()
            more = {"num_blocks": NUM_BLOCKS[kind], "max_model_len": MAX_MODEL_LEN}
            arms[kind] = (
                "ours",
                Settings(model=model(kind), dtype="float32", folder=str(folder / kind), **more),
            )
        measured = Bench(start_workers(arms, folder, stack))
        for num_tokens in PROMPT_TOKENS:
            measured.measure(num_tokens, repeats)
        capacity = {kind: worker.call("capacity") for kind, worker in measured.workers.items()}
    show(measured, capacity)


def show(measured: Bench, capacity: dict[str, dict[str, int]]) -> None:
    """Print the report."""
    per_byte = {kind: found["tokens"] / found["bytes"] for kind, found in capacity.items()}
    shares: dict[str, dict[str, Any]] = {"restored_bytes_share": {}, "restore_ttft_share": {}}
    rows = []
    for num_tokens in PROMPT_TOKENS:
        name = str(num_tokens)
        shares["restored_bytes_share"][name] = round(
            measured.bytes["windows", num_tokens] / measured.bytes["full", num_tokens], 3
        )
        with_windows, without = (measured.ttft_s[kind, "host", num_tokens] for kind in ("windows", "full"))
        ratios = [mine / other for mine, other in zip(with_windows, without, strict=True)]
        shares["restore_ttft_share"][name] = round(statistics.median(ratios), 3)
        rows.append((f"TTFT from host memory, {name} tokens, with windows over without", spread(ratios), ""))
    medians = {
        kind: {
            str(num_tokens): {
                source: round(statistics.median(measured.ttft_s[kind, source, num_tokens]) * 1e3, 1)
                for source in ("host", "recompute")
            }
            for num_tokens in PROMPT_TOKENS
        }
        for kind in LAYERS
    }
    result: dict[str, Any] = {
        **shares,
        "tokens_per_byte_ratio": round(per_byte["windows"] / per_byte["full"], 2),
        "tokens_identical": not measured.wrong,
        "different": measured.wrong,
        "ttft_ms": medians,
        "capacity": capacity,
        "window_tokens": WINDOW_TOKENS,
    }
    report("windows", rows, result)


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="two repeats, within 3 minutes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines and files are cleared away
    bench(2 if parser.parse_args().quick else 5)


if __name__ == "__main__":
    main()
