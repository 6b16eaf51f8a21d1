"""How well are answer lengths predicted, and what does a guess cost? Recorded requests in their order: each is predicted, then observed.

    python -m bench.sim.length [--folder PATH] [--data azure|ssjf|turns|plain|single|oasst|apps] [--jsonl PATH] [--refit-every N] [--quick] [--seed N]

What runs: `engine_bridge.predict.length`, refitted after every `--refit-every` answers (live, a thread does that now and then; here time stands
still meanwhile). The first `--warm-up` answers are learned from but not counted; of small data an eighth and a quarter. Data:
  azure   Azure's conversations (2023, CC-BY-4.0, Patel et al., ISCA 2024): 19,366 requests with nothing but prompt and answer lengths; without
          the trace, log-normal ones of its quantiles, in which nothing can be predicted
  ssjf    answers of a Vicuna 13B (SSJF, Qiu et al., 2024, Apache-2.0), capped near 512, with the guess of its fine-tuned BERT in five classes,
          and nothing else: "+ BERT" gives ours that class as a hint. Left out where it is not there
  turns   MT-Bench-101 (Apache-2.0): conversations with text, in random order, turns in theirs. Tokens are taken as words · 4/3. The task's name is
          the adapter, which is synthetic. Without the file, conversations are made up: sentences of ours of six kinds, whose answers have Azure's
          quantiles all together (p50 129, p99 601) and differ by kind as we chose. Their figures say that the bench runs, not what hints are worth
  plain   the same without adapters: what a base model sees
  single  the first turn of each of these conversations alone, without adapters: questions that have nothing in common but who answers
  apps    made up: twelve programs with a system prompt and a template each that they fill in, half of which share one system prompt; the lengths
          of a program's answers are log-normal (sigma 0.35). Its figures say that templates are told apart, not how alike real programs' answers are
  oasst   OpenAssistant (Apache-2.0), 100 trees of messages: every answer of a person to the messages above it. Left out where it is not there
  --jsonl a file of yours, a line for each request in the order in which they came: `messages` (role, content) or `prompt` and perhaps `system`;
          `answer`, or `num_tokens` of it
"no hints" and "+ hints": without and with `engine_bridge.predict.hints`, which is what requests carry.

Baselines: `recent`, the same quantiles of the last 512 answers, whatever the request; `BERT`, those of the last 512 answers of the class that BERT
has named. The last line is JSON. `runs[]`: `p50_error` is the median of |guess − length| / length, `p50_mae_tokens` its mean in tokens, `loss_p50`
and `loss_p90` the pinball losses in tokens (what a quantile is judged by: less is better), `p90_coverage` the share within p90, which should be 0.9,
`p90_over_p50` the median width. `accuracy` is the paper's, as SSJF has it: the share of requests whose p50 lies in the same of five buckets as the
length; buckets end at the 25th, 50th, 75th and 99th percentile of all lengths. `accuracy_2`: of two buckets, parted at the median. Chameleon
assumes 0.8 and tries 0.6, and does not say of how many. `bert_accuracy`, `bert_accuracy_2` are those of BERT's own class. `predict_us`,
`observe_us`, `hints_us` (of reading the text): medians; `refit_s`: mean.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.data import FOLDER, lines_of
from bench.live.report import report
from engine_bridge.predict.hints import read_conversation, setting_hints
from engine_bridge.predict.length import (
    P50,
    P90,
    LengthFeatures,
    LengthGuess,
    LengthPredictor,
    OnlineLengths,
    Recent,
)
from engine_bridge.protocol.asked import NOTHING_ASKED
from engine_bridge.protocol.request_context import RequestContext

AZURE = "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.zst"
SSJF = "length_prediction/ssjf_predictions_warmup_multi_cls_1000K.csv.zst"
TURNS = "sharegpt_multiturn/mtbench101.jsonl.zst"
OASST = "sharegpt_multiturn/oasst_en_100_tree.jsonl.zst"
BUCKET_ENDS = (0.25, 0.5, 0.75, 0.99)
SSJF_COUNT = 30_000
TOKENS_PER_WORD = 4 / 3
# Recorded conversations say nothing of temperatures and stop strings.
NO_SETTINGS = setting_hints(
    is_structured=False, temperature=None, is_bounded=False, has_stop=False, ignores_eos=False
)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request, and how long its answer was. bert: the class that SSJF's model has named."""

    features: LengthFeatures
    num_tokens: int
    bert: int | None = None
    hints_us: float | None = None


# -- data --------------------------------------------------------------------------------------------------------------


def azure(folder: Path, rng: random.Random) -> list[Answered]:
    path = folder / AZURE
    if path.exists():
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(lines_of(path))]
    else:
        rows = [
            (int(rng.lognormvariate(math.log(1020), 0.6)), int(rng.lognormvariate(math.log(129), 0.85)))
            for _ in range(19_366)
        ]
    return [Answered(LengthFeatures(num_prompt_tokens=prompt), answer) for prompt, answer in rows]


def ssjf(folder: Path, rng: random.Random) -> list[Answered]:
    """In the file's order, which is random already."""
    if not (folder / SSJF).exists():
        return []
    rows = list(csv.DictReader(lines_of(folder / SSJF)))[:SSJF_COUNT]
    return [
        Answered(
            LengthFeatures(num_prompt_tokens=0), int(r["output_token_length"]), int(r["predicted_length"])
        )
        for r in rows
    ]


def turns(folder: Path, rng: random.Random) -> list[Answered]:
    path = folder / TURNS
    if not path.exists():
        return mixed([made_up(number, rng) for number in range(1400)], rng)
    return mixed([list(conversation(json.loads(line))) for line in lines_of(path)], rng)


def plain(folder: Path, rng: random.Random) -> list[Answered]:
    return [without_adapter(answered) for answered in turns(folder, rng)]


def without_adapter(answered: Answered) -> Answered:
    context = msgspec.structs.replace(answered.features.context, adapter="")
    return replace(answered, features=msgspec.structs.replace(answered.features, context=context))


def single(folder: Path, rng: random.Random) -> list[Answered]:
    """First turns, of no session."""
    path = folder / TURNS
    if not path.exists():
        found = [made_up(number, rng)[0] for number in range(1400)]
    else:
        found = [next(conversation(json.loads(line))) for line in lines_of(path)]
    rng.shuffle(found)
    return [nobodys(answered) for answered in found]


def nobodys(answered: Answered) -> Answered:
    """Of no session and no adapter."""
    context = RequestContext(asked=answered.features.context.asked)
    return replace(answered, features=msgspec.structs.replace(answered.features, context=context))


def apps(folder: Path, rng: random.Random) -> list[Answered]:
    """See the module's docstring."""
    programs = []
    for number in range(12):
        system = f"You are program {number // 2 * 2 if number < 6 else number}. " + " ".join(
            rng.choices(TOPICS, k=4)
        )
        opening = " ".join(
            rng.choices("consider now this given text about and then please note for us".split(), k=6)
        )
        programs.append((system, opening, math.log(rng.choice((20, 45, 75, 130, 210, 330, 480)))))
    found = []
    for _ in range(4000):
        system, opening, mean = rng.choice(programs)
        question = f"{opening}: {' '.join(rng.choices(TOPICS, k=rng.randint(1, 9)))}"
        length = max(int(rng.lognormvariate(mean, 0.35)), 1)
        found.append(asked([("system", system), ("user", question)], length, "", ""))
    return found


def of_file(path: Path, folder: Path, rng: random.Random) -> list[Answered]:
    """Requests of a file of the user's, in its order."""
    found = []
    for record in map(json.loads, lines_of(path)):
        messages = [(message["role"], message["content"]) for message in record.get("messages", ())]
        messages = messages or [("system", record.get("system", "")), ("user", record["prompt"])]
        length = record["num_tokens"] if "num_tokens" in record else words(record["answer"])
        found.append(asked(messages, length, str(record.get("session", "")), str(record.get("adapter", ""))))
    return found


def oasst(folder: Path, rng: random.Random) -> list[Answered]:
    path = folder / OASST
    if not path.exists():
        return []
    return mixed([list(tree(json.loads(line))) for line in lines_of(path)], rng)


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
    session, messages = f"{record['task']}-{record['id']}", []
    for turn in record["history"]:
        messages.append(("user", turn["user"]))
        yield asked(messages, words(turn["bot"]), session, record["task"])
        messages.append(("assistant", turn["bot"]))


def tree(record: dict[str, Any]) -> Iterator[Answered]:
    """Every answer, in the order in which one reads the tree. A session is the way from the root: answers beside each other belong to none's past."""

    def below(message: dict[str, Any], before: list[tuple[str, str]]) -> Iterator[Answered]:
        role = "user" if message["role"] == "prompter" else "assistant"
        if role == "assistant":
            yield asked(before, words(message["text"]), "", "")
        for reply in message["replies"]:
            yield from below(reply, [*before, (role, message["text"])])

    return below(record["prompt"], [])


def asked(messages: Sequence[tuple[str, str]], num_tokens: int, session: str, adapter: str) -> Answered:
    start = time.perf_counter()
    read = read_conversation(messages).numbers()
    hints_us = (time.perf_counter() - start) * 1e6
    features = LengthFeatures(
        num_prompt_tokens=sum(words(text) for _, text in messages),
        context=RequestContext(session_id=session, adapter=adapter, asked=read),
        hints=read.hints + NO_SETTINGS,
    )
    return Answered(features, num_tokens, hints_us=hints_us)


# Kinds of questions, and the median of their answers in tokens. Chosen, so that all together have the quantiles of Azure's conversations.
KINDS = {
    "Is it true that {}? Answer with yes or no.": 20,
    "Translate this into French: {}.": 45,
    "Who was the first to say that {}?": 75,
    "Explain why {}.": 210,
    "Give me a list of {} reasons and examples why {}.": 280,
    "Write a python function that shows {} and explain it step by step.": 330,
}
TOPICS = ("water boils", "trains are late", "the moon has no wind", "bread rises", "prices fall", "cats purr")


def made_up(number: int, rng: random.Random) -> list[Answered]:
    """A conversation of one to five turns of one kind."""
    kind = rng.choice(list(KINDS))
    found, messages = [], []
    for _ in range(rng.randint(1, 5)):
        question = kind.replace("{}", rng.choice(TOPICS))
        length = max(int(rng.lognormvariate(math.log(KINDS[kind]), 0.35)), 1)
        messages.append(("user", question))
        answer = "word " * max(round(length / TOKENS_PER_WORD), 1)
        found.append(asked(messages, words(answer), f"made-{number}", ""))
        messages.append(("assistant", answer))
    return found


def words(text: str) -> int:
    return round(len(text.split()) * TOKENS_PER_WORD)


DATA: dict[str, Callable[[Path, random.Random], list[Answered]]] = {
    "azure": azure,
    "ssjf": ssjf,
    "turns": turns,
    "plain": plain,
    "single": single,
    "oasst": oasst,
    "apps": apps,
}


# -- arms --------------------------------------------------------------------------------------------------------------


class RecentOfClass:
    """Quantiles of the last 512 answers of the same class; the class is the first hint, and nobody's is one, too."""

    def __init__(self) -> None:
        self._recent: dict[tuple[float, ...], Recent] = defaultdict(lambda: Recent(512))

    def predict(self, features: LengthFeatures) -> LengthGuess:
        recent = self._recent[features.hints[:1]]
        if not len(recent):
            return LengthGuess(128, 512, "prior")
        return LengthGuess(round(recent.quantile(P50)), round(recent.quantile(P90)), "class")

    def observe(self, features: LengthFeatures, num_tokens: int) -> None:
        self._recent[features.hints[:1]].add(num_tokens)

    def refit(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Arm:
    """A predictor, and which hints it gets: `all` the data's own, `bert` the class named, `none`."""

    make: Callable[[int, int], LengthPredictor]
    hints: str = "all"


OURS = Arm(lambda num_hints, seed: OnlineLengths(num_hints=num_hints, seed=seed))
RECENT = Arm(lambda num_hints, seed: RecentOfClass(), "none")
WITH_TEXT = {"recent": RECENT, "ours, no hints": Arm(OURS.make, "none"), "ours + hints": OURS}
ARMS = {
    "azure": {"recent": RECENT, "ours": OURS},
    "ssjf": {
        "recent": RECENT,
        "BERT": Arm(lambda num_hints, seed: RecentOfClass(), "bert"),
        "ours + BERT": Arm(OURS.make, "bert"),
    },
    "turns": WITH_TEXT,
    "plain": WITH_TEXT,
    "single": WITH_TEXT,
    "oasst": WITH_TEXT,
    "apps": WITH_TEXT,
}


def hinted(answered: Answered, hints: str) -> LengthFeatures:
    features = answered.features
    given = {"all": features.hints, "bert": (float(answered.bert or 0),), "none": ()}[hints]
    context = features.context
    if hints != "all":
        context = msgspec.structs.replace(context, asked=NOTHING_ASKED)
    return LengthFeatures(num_prompt_tokens=features.num_prompt_tokens, context=context, hints=given)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    pairs: list[tuple[LengthGuess, int]] = field(default_factory=list)
    predict_us: list[float] = field(default_factory=list)
    observe_us: list[float] = field(default_factory=list)
    refit_s: list[float] = field(default_factory=list)

    def result(self, ends: Sequence[int]) -> dict[str, Any]:
        relative = [abs(guess.p50 - length) / max(length, 1) for guess, length in self.pairs]
        middle = ends[1]
        halves = [(guess.p50 >= middle) == (length >= middle) for guess, length in self.pairs]
        same = [bucket(guess.p50, ends) == bucket(length, ends) for guess, length in self.pairs]
        return {
            "num_counted": len(self.pairs),
            "p50_error": round(statistics.median(relative), 3),
            "p50_mae_tokens": round(statistics.fmean(abs(g.p50 - n) for g, n in self.pairs), 1),
            "loss_p50": round(statistics.fmean(pinball(g.p50, n, P50) for g, n in self.pairs), 2),
            "loss_p90": round(statistics.fmean(pinball(g.p90, n, P90) for g, n in self.pairs), 2),
            "p90_coverage": round(statistics.fmean(n <= g.p90 for g, n in self.pairs), 4),
            "p90_over_p50": round(statistics.median(g.p90 / max(g.p50, 1) for g, _ in self.pairs), 2),
            "accuracy": round(statistics.fmean(same), 4),
            "accuracy_2": round(statistics.fmean(halves), 4),
            "predict_us": round(statistics.median(self.predict_us), 1),
            "observe_us": round(statistics.median(self.observe_us), 1),
            "refit_s": round(statistics.fmean(self.refit_s), 2) if self.refit_s else 0.0,
        }


def pinball(guess: float, length: float, quantile: float) -> float:
    over = length - guess
    return max(quantile * over, (quantile - 1) * over)


def bucket(num_tokens: int, ends: Sequence[int]) -> int:
    return bisect_right(ends, num_tokens)


def bucket_ends(answers: Sequence[Answered]) -> list[int]:
    lengths = sorted(answered.num_tokens for answered in answers)
    return [lengths[int(share * (len(lengths) - 1))] for share in BUCKET_ENDS]


def measure(answers: Sequence[Answered], arm: Arm, args: argparse.Namespace) -> Tally:
    """Predict, then observe, each in its turn."""
    asked = [hinted(answered, arm.hints) for answered in answers]
    predictor, tally = arm.make(len(asked[0].hints), args.seed), Tally()
    clock = time.perf_counter
    for at, (features, answered) in enumerate(zip(asked, answers, strict=True)):
        start = clock()
        guess = predictor.predict(features)
        between = clock()
        predictor.observe(features, answered.num_tokens)
        end = clock()
        if at >= args.warm_up:
            tally.pairs.append((guess, answered.num_tokens))
            tally.predict_us.append((between - start) * 1e6)
            tally.observe_us.append((end - between) * 1e6)
        if (at + 1) % args.refit_every == 0:
            start = clock()
            predictor.refit()
            tally.refit_s.append(clock() - start)
    return tally


def fitting(args: argparse.Namespace, num: int) -> argparse.Namespace:
    """Data of a few hundred answers are warmed up with a quarter of them and refitted eight times."""
    few = {"warm_up": min(args.warm_up, num // 4), "refit_every": min(args.refit_every, max(num // 8, 1))}
    return argparse.Namespace(**vars(args) | few)


def run(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    answers = DATA[name](args.folder, random.Random(args.seed))
    if args.quick:
        answers = answers[:6000]
    if not answers:
        print(f"{name}: not in {args.folder}, left out", file=sys.stderr)
        return
    ends = bucket_ends(answers)
    named = [(a.bert, bucket(a.num_tokens, ends)) for a in answers if a.bert is not None]
    read = [answered.hints_us for answered in answers if answered.hints_us is not None]
    hints_us = round(statistics.median(read), 1) if read else None
    for arm_name, arm in ARMS[name].items():
        yield {
            "data": name,
            "arm": arm_name,
            "num_requests": len(answers),
            "bucket_ends_tokens": ends,
            "bert_accuracy": round(statistics.fmean(b == t for b, t in named), 4) if named else None,
            "bert_accuracy_2": round(statistics.fmean((b > 1) == (t > 1) for b, t in named), 4)
            if named
            else None,
            "hints_us": hints_us,
            **measure(answers, arm, fitting(args, len(answers))).result(ends),
        }


def row_of(run: dict[str, Any]) -> tuple[str, str, str]:
    figures = (
        f"{run['p50_error']:7.0%}{run['p50_mae_tokens']:8.0f}{run['loss_p50']:9.1f}{run['loss_p90']:7.1f}"
    )
    figures += (
        f"{run['p90_coverage']:9.1%}{run['p90_over_p50']:7.1f}{run['accuracy']:9.1%}{run['accuracy_2']:6.1%}"
    )
    cost = f"{run['predict_us']:7.1f}{run['observe_us']:8.1f} µs{run['refit_s']:7.2f} s"
    return f"{run['data']:<7}{run['arm']}", figures, cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the data lie")
    parser.add_argument("--data", choices=DATA, action="append", help="all by default")
    parser.add_argument("--jsonl", type=Path, action="append", default=[], help="requests of yours")
    parser.add_argument("--refit-every", type=int, default=1000, help="answers")
    parser.add_argument("--warm-up", type=int, default=1000, help="answers")
    parser.add_argument("--quick", action="store_true", help="the first 6,000 requests of each")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for path in args.jsonl:
        DATA[path.stem], ARMS[path.stem] = partial(of_file, path), WITH_TEXT
    chosen = (args.data or ([] if args.jsonl else list(DATA))) + [path.stem for path in args.jsonl]
    runs = []
    for found in (found for name in chosen for found in run(name, args)):
        runs.append(found)
        print(*row_of(found), file=sys.stderr, flush=True)
    result = {
        "bench": "length",
        "is_recorded": (args.folder / AZURE).exists(),
        "is_text_recorded": (args.folder / TURNS).exists(),
        "refit_every": args.refit_every,
        "warm_up": args.warm_up,
        "seed": args.seed,
        "runs": runs,
    }
    head = (
        "data, arm",
        "  error     MAE  loss p50    p90  covered  width accuracy  of 2",
        "predict observe      refit",
    )
    report("Answer lengths, predicted one by one", [head, *map(row_of, runs)], result)


if __name__ == "__main__":
    main()
