"""Follow-up turns of `bench.live.restore`: their prompts, and what became of them by engine, source and length of history."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.live.peers.play import FIRST_TEXT_TOKEN, text
from bench.live.report import spread

HISTORY_TOKENS = (512, 1024, 2048, 4096)
NEW_TURN_TOKENS = 32


@dataclass
class Turns:
    """What the turns of all engines gave. TTFTs in seconds."""

    ttft_s: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """By engine, source and history length."""
    answers: dict[tuple[int, int], dict[tuple[str, str], list[int]]] = field(default_factory=dict)
    """Token ids by history length and repeat, then by engine and source."""
    num_cached: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)

    def median_s(self, kind: str, source: str, num_tokens: int) -> float | None:
        times = self.ttft_s.get((kind, source, num_tokens))
        return statistics.median(times) if times else None


def history_of(num_tokens: int) -> list[int]:
    """The history of this length; no two share a prefix."""
    return text(num_tokens, "history", num_tokens)


def first_turn(history: list[int]) -> list[int]:
    """A prompt that leaves exactly `history` in whole blocks: a turn's last token has no KV yet."""
    return [*history, FIRST_TEXT_TOKEN]


def follow_up(history: list[int], *seed: object, num_tokens: int = NEW_TURN_TOKENS) -> list[int]:
    """The history, its last token and a new turn: `num_tokens` to compute."""
    return first_turn(history) + text(num_tokens - 1, "turn", *seed)


def compare_answers(turns: Turns) -> dict[str, Any]:
    """Are all answers to the same prompt the same? Recomputed ones are left out where stock vLLM disagrees with itself."""
    wrong: list[str] = []
    num_ambiguous = 0
    for (num_tokens, repeat), answers in turns.answers.items():
        reference = answers.get(("stock", "device")) or next(reversed(answers.values()))
        is_ambiguous = answers.get(("stock", "recompute"), reference) != reference
        num_ambiguous += is_ambiguous
        for (kind, source), answer in answers.items():
            if answer != reference and not (source == "recompute" and is_ambiguous):
                wrong.append(f"{kind} {source} {num_tokens} #{repeat}")
    return {"tokens_identical": not wrong, "different": wrong, "num_ambiguous_turns": num_ambiguous}


def by_source(turns: Turns, kind: str) -> dict[str, dict[str, float]]:
    """Median TTFT in seconds by history length and source."""
    out: dict[str, dict[str, float]] = {}
    for (who, source, num_tokens), times in turns.ttft_s.items():
        if who == kind:
            out.setdefault(str(num_tokens), {})[source] = round(statistics.median(times), 4)
    return out


def restore_ratios(turns: Turns, kind: str) -> dict[str, dict[str, float]]:
    """How many times sooner a follow-up answers than on stock vLLM that has to compute the history."""
    return {
        num_tokens: {
            source: round(recompute / ttft_s, 2)
            for source, ttft_s in sources.items()
            if source != "recompute"
        }
        for num_tokens, sources in by_source(turns, kind).items()
        if (recompute := turns.median_s("stock", "recompute", int(num_tokens)))
    }


def turn_rows(turns: Turns, floors: dict[int, float]) -> list[tuple[str, str, str]]:
    """Table rows by history length: every engine and source, in ms, with the memcpy time of the KV as the floor."""
    rows = []
    for (kind, source, num_tokens), times in sorted(turns.ttft_s.items(), key=lambda item: item[0][2]):
        note = ""
        recompute = turns.median_s("stock", "recompute", num_tokens)
        if source != "recompute" and recompute:
            note = f"recompute ÷ this {recompute / statistics.median(times):.1f}"
        if source == "host":
            note += f"; memcpy of the KV alone {floors[num_tokens] * 1e3:.1f} ms"
        cached = statistics.median(turns.num_cached[kind, source, num_tokens])
        what = f"TTFT after {num_tokens} tokens, {kind}, {source}, ms"
        rows.append(
            (what, spread([value * 1e3 for value in times]), f"{note}  [{cached:.0f} cached]".strip())
        )
    return rows
