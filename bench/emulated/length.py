"""How well are answer lengths predicted? Recorded requests in their order: each is predicted, then observed.

    python -m bench.emulated length [--part turns|plain|single|trees|files] [--jsonl PATH] [--quick] [--seed N] [--jobs N]

What runs: `engine_bridge.predict.length`, refitted after every 1,000 answers (live, a thread does that now and then; here time stands still
meanwhile). The first 1,000 answers are learned from but not counted; of small data an eighth and a quarter. With each seed in another order. Data:
  turns   MT-Bench-101 (Apache-2.0) from the folder of recorded traffic: conversations with text, in random order, turns in theirs. Tokens are taken
          as words · 4/3. The task's name is the adapter, which is synthetic. Left out where the file is missing
  plain   the same without adapters: what a base model sees
  single  800 of the first turns of the same, without adapters: questions that hardly repeat each other
  trees   questions of OpenAssistant's trees (Apache-2.0), each with its best answer and what was said before: 254 of them
  files   files of yours (`--jsonl`), a line for each request in the order in which they came: `messages` (role, content) or `prompt` and perhaps
          `system`; `answer`, or `num_tokens` of it
Arms: `recent`, quantiles of the last 512 answers, whatever the request; ours without and with `engine_bridge.predict.hints`, which is what requests
carry.

The last line is JSON. `runs[]`: `p50_error` is the median of |guess − length| / length, `p90_coverage` the share within p90, which should be 0.9.
`accuracy` is the paper's, as SSJF has it: the share of requests whose p50 lies in the same of five buckets as the length; buckets end at the 25th,
50th, 75th and 99th percentile of all lengths. Chameleon assumes 0.8 and tries 0.6, and does not say of how many.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.data import MT_BENCH, OPEN_ASSISTANT, are_recorded, lines_of
from bench.emulated.core.arrivals import CLASS_ENDS
from bench.emulated.table import Bench, Table
from engine_bridge.predict.hints import read_conversation, setting_hints
from engine_bridge.predict.length import P50, P90, OnlineLengths, Recent
from engine_bridge.protocol.asked import NOTHING_ASKED
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess

EVERY, NUM_RECENT = 1000, 512
NUM_SINGLE = 800
# The share of single questions in the right class that is aimed at.
AIM = 0.45
TOKENS_PER_WORD = 4 / 3
# Recorded conversations say nothing of temperatures and stop strings.
NO_SETTINGS = setting_hints(
    is_structured=False, temperature=None, is_bounded=False, has_stop=False, ignores_eos=False
)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, and how long its answer was."""

    features: EngineRequest
    num_tokens: int


# -- data --------------------------------------------------------------------------------------------------------------


def turns(rng: random.Random) -> list[Answered]:
    """Return the turns of recorded conversations."""
    return mixed([list(conversation(json.loads(line))) for line in lines_of(MT_BENCH)], rng)


def first_turns(rng: random.Random) -> list[Answered]:
    """Return the first turns of NUM_SINGLE recorded conversations."""
    records = map(json.loads, lines_of(MT_BENCH))
    found = [next(conversation(record)) for record in records]
    return rng.sample(found, NUM_SINGLE)


def trees(rng: random.Random) -> list[Answered]:
    """Return the questions of recorded trees of conversations, with the answers that people liked best."""
    found = [each for line in lines_of(OPEN_ASSISTANT) for each in branch(json.loads(line)["prompt"], [])]
    rng.shuffle(found)
    return found


def branch(question: dict[str, Any], before: list[tuple[str, str]]) -> Iterator[Answered]:
    """Yield a question of a tree and the questions that follow its best answer."""
    said = [*before, ("user", question["text"])]
    answers = [reply for reply in question["replies"] if reply["role"] == "assistant"]
    if not answers:
        return
    best = min(answers, key=lambda reply: math.inf if reply.get("rank") is None else reply["rank"])
    yield asked(said, words(best["text"]), "", "")
    for reply in best["replies"]:
        yield from branch(reply, [*said, ("assistant", best["text"])])


def of_file(path: Path) -> list[Answered]:
    """Return the requests of a user's file, in its order."""
    found = []
    for record in map(json.loads, lines_of(path)):
        messages = [(message["role"], message["content"]) for message in record.get("messages", ())]
        messages = messages or [("system", record.get("system", "")), ("user", record["prompt"])]
        length = record["num_tokens"] if "num_tokens" in record else words(record["answer"])
        found.append(asked(messages, length, str(record.get("session", "")), str(record.get("adapter", ""))))
    return found


def mixed(waiting: list[list[Answered]], rng: random.Random) -> list[Answered]:
    """Each conversation's turns one after the other, conversations mixed as if sixteen people were there at a time."""
    rng.shuffle(waiting)
    open_: list[list[Answered]] = []
    found = []
    while waiting or open_:
        while waiting and len(open_) < 16:
            open_.append(waiting.pop())
        chosen = rng.choice(open_)
        found.append(chosen.pop(0))
        open_ = [left for left in open_ if left]
    return found


def conversation(record: dict[str, Any]) -> Iterator[Answered]:
    """Yield the turns of a recorded conversation."""
    session, messages = f"{record['task']}-{record['id']}", []
    for turn in record["history"]:
        messages.append(("user", turn["user"]))
        yield asked(messages, words(turn["bot"]), session, record["task"])
        messages.append(("assistant", turn["bot"]))


def asked(messages: Sequence[tuple[str, str]], num_tokens: int, session: str, adapter: str) -> Answered:
    """Return a request with the features that ours would read of it."""
    read = read_conversation(messages).numbers()
    features = EngineRequest(
        num_prompt_tokens=sum(words(text) for _, text in messages),
        session_id=session,
        adapter=adapter,
        asked=read,
        hints=read.hints + NO_SETTINGS,
    )
    return Answered(features, num_tokens)


def words(text: str) -> int:
    """Return the tokens of a text, estimated by its words."""
    return round(len(text.split()) * TOKENS_PER_WORD)


# -- runs --------------------------------------------------------------------------------------------------------------

ARMS = ("recent", "ours, no hints", "ours + hints")
DATA = {"turns": turns, "plain": turns, "single": first_turns, "trees": trees}


@dataclass(frozen=True, slots=True)
class Point:
    """One arm on one data set, of which the first `most` requests count. path: of a user's file."""

    data: str
    arm: str
    most: float
    path: Path | None = None
    seed: int = 0


def answers_of(point: Point) -> list[Answered]:
    """Return the requests of a point, with the hints and adapters that its arm and data have."""
    rng = random.Random(point.seed)
    answers = of_file(point.path) if point.path is not None else DATA[point.data](rng)
    changed: dict[str, Any] = {"adapter": ""} if point.data in ("plain", "single") else {}
    if point.arm != "ours + hints":
        changed |= {"asked": NOTHING_ASKED, "hints": ()}
    return [
        replace(answered, features=msgspec.structs.replace(answered.features, **changed))
        for answered in answers[: int(min(point.most, len(answers)))]
    ]


def guesses_of(answers: Sequence[Answered], arm: str, seed: int) -> Iterator[LengthGuess]:
    """Yield the guess for each request; it is made before the answer is observed."""
    recent, every = Recent(NUM_RECENT), min(EVERY, max(len(answers) // 8, 1))
    ours = OnlineLengths(num_hints=len(answers[0].features.hints), seed=seed)
    for at, answered in enumerate(answers, 1):
        if arm != "recent":
            yield ours.predict(answered.features)
            ours.observe(answered.features, answered.num_tokens)
            if at % every == 0:
                ours.refit()
            continue
        has_any = len(recent) > 0
        p50, p90 = (round(recent.quantile(share)) if has_any else 128 for share in (P50, P90))
        yield LengthGuess(p50, p90, "recent")
        recent.add(answered.num_tokens)


def serve(point: Point) -> dict[str, Any]:
    """Return the figures of one arm on one data set."""
    answers = answers_of(point)
    lengths = sorted(answered.num_tokens for answered in answers)
    ends = [lengths[int(share * (len(lengths) - 1))] for share in CLASS_ENDS]
    guesses = guesses_of(answers, point.arm, point.seed)
    pairs = [(guess, answered.num_tokens) for guess, answered in zip(guesses, answers, strict=True)]
    pairs = pairs[min(EVERY, len(pairs) // 4) :]
    relative = [abs(guess.p50 - length) / max(length, 1) for guess, length in pairs]
    same = [bisect_right(ends, guess.p50) == bisect_right(ends, length) for guess, length in pairs]
    return {
        "data": point.data,
        "arm": point.arm,
        "num_requests": len(answers),
        "p50_error": round(statistics.median(relative), 3),
        "p90_coverage": round(statistics.fmean(length <= guess.p90 for guess, length in pairs), 4),
        "accuracy": round(statistics.fmean(same), 4),
    }


def lengths_part(data: str, bench: Bench) -> None:
    """Find the figures of all arms on one data set, or on each file of the user's."""
    if data != "files" and not are_recorded(OPEN_ASSISTANT if data == "trees" else MT_BENCH):
        return
    sets = [(path.stem, path) for path in bench.files] if data == "files" else [(data, None)]
    points = [Point(name, arm, bench.size, path) for name, path in sets for arm in ARMS]
    bench.play(points)
    for point in points:
        runs = bench.of(point)
        bench.found.setdefault("runs", []).extend(runs)
        aim = AIM if data in ("single", "trees") and point.arm == ARMS[-1] else None
        for name, wanted in (("accuracy", aim), ("p90_coverage", None)):
            figures = [run[name] for run in runs]
            bench.figure((name, point.data, point.arm), figures, wanted, False, "share")


TABLE = Table(
    "emulated-length",
    "Answer lengths, predicted one by one",
    serve,
    {name: partial(lengths_part, name) for name in (*DATA, "files")},
    (math.inf, 6000),
    "the first 6,000 requests of each",
    seeds=3,
    quick_seeds=3,
    files=("--jsonl", "requests of yours"),
)
