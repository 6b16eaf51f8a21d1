"""Recorded runs of agents as programs for `bench.emulated agents`: which calls belong together, and what each of them asks.

A file has a line for each call: `run`, `call`, `at_s` (within the run), `prompt_chars` and `output_chars`. With `shared_chars` prompts are whole,
and so many of their first characters an earlier call of the run had, too: a call continues the latest earlier one whose prompt is that long. Without,
`prompt_chars` are of the last message, and `agent` says whose context that is.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# Characters of a token, and the speed at which the recorded answers are taken to have come: a pause is the rest of the time until the next call.
# Chosen: English text, and a served model of some ten billion parameters.
TOKEN_CHARS, RECORDED_TOKENS_PER_S = 4, 50.0
MIN_ANSWER_TOKENS = 16


class RecordedCall(NamedTuple):
    """One call of a run. context: the name of the conversation that it continues, within its run. pause_s: until the next call."""

    context: str
    num_prompt_tokens: int
    num_answer_tokens: int
    pause_s: float


def read_runs(path: Path) -> list[tuple[RecordedCall, ...]]:
    """Return the calls of each run of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: a column is missing, or has something else than a number.
    """
    runs: dict[str, list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            runs[line.get("run", "")].append(line)
    try:
        return [_calls(lines) for lines in runs.values()]
    except KeyError as error:
        raise ValueError(f"{path} has no column {error}") from error


def _calls(lines: list[dict[str, str]]) -> tuple[RecordedCall, ...]:
    lines = sorted(lines, key=lambda line: float(line["at_s"]))
    calls: list[RecordedCall] = []
    prompts: list[tuple[int, str]] = []
    grown: dict[str, int] = defaultdict(int)
    for number, line in enumerate(lines):
        num_chars = int(line["prompt_chars"])
        num_answer = max(int(line["output_chars"]) // TOKEN_CHARS, MIN_ANSWER_TOKENS)
        if "shared_chars" in line:
            num_shared = int(line["shared_chars"])
            earlier = (
                context for length, context in reversed(prompts) if num_shared and length >= num_shared
            )
            context = next(earlier, str(number))
            prompts.append((num_chars, context))
            num_tokens = max(num_chars // TOKEN_CHARS, 1)
        else:
            context = line["agent"]
            num_tokens = grown[context] + max(num_chars // TOKEN_CHARS, 1)
            grown[context] = num_tokens + num_answer
        pause_s = 0.0
        if number + 1 < len(lines):
            gap_s = float(lines[number + 1]["at_s"]) - float(line["at_s"])
            pause_s = max(gap_s - num_answer / RECORDED_TOKENS_PER_S, 0.0)
        calls.append(RecordedCall(context, num_tokens, num_answer, pause_s))
    return tuple(calls)
