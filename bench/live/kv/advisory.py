"""What advisories are worth: people who read and type, pasted drafts, and agents that call each other, with too little device memory.

    python -m bench.live.kv.advisory [--quick] [--source device | disk]

`--source disk` is another bench, of one size, which takes a quarter of an hour: see `bench.live.kv.advisory_disk`. The rest is of the other one.

Two engines, each in a process of its own, take turns: our node, and stock vLLM (prefix cache, statistics off) with the same device memory, a tenth of
what the conversations need. Model: `bench.live.shared.models`.

People read an answer and type a question of ten words (`bench.live.kv.people`); an advisory goes out when they begin to type. A round begins in the
middle of their reading and typing. Arms on our node: all advisories, and one in ten missing. Arms take turns in random order, and each begins with
the same histories.

The last line is JSON. `ttft_p50_ms`: of follow-ups, by arm. `missing_10pct_penalty`: mean TTFT of that arm over the arm with all advisories, less 1.
`draft_ttft_ratio`: TTFT of a pasted question of 2,000 tokens that was computed as a draft before Enter, over the same without.
`agent_workflow_speedup`: stock vLLM's time over ours for an architect, three engineers and QA in three review rounds over shared documents.
`tokens_identical`: the same turns of the same conversations got the same tokens from both engines.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from bench.live.kv.advisory_disk import run_disk
from bench.live.kv.people import script, times_of
from bench.live.peers.play import text
from bench.live.peers.worker import Worker, alike
from bench.live.shared.models import ModelShape
from bench.live.shared.report import Progress, figures, options, report, spread, spread_ms
from bench.live.shared.rounds import in_turn
from bench.measures import quantile

# A paragraph; the engines write its first tokens only, so that TTFT is what counts.
ANSWER_WORDS = 40
NEW_TOKENS, ANSWER_TOKENS = 32, 8
DRAFT_TOKENS, TAIL_TOKENS = 2000, 8
REVIEW_ROUNDS = 3
GROUPS = (("architect",), ("engineer0", "engineer1", "engineer2"), ("qa",))
"""Agents that work side by side, in the order in which the groups follow each other."""
# Each arm's engine and the share of its questions that are announced.
ARMS = {"ours": ("ours", 1.0), "missing": ("ours", 0.9), "stock": ("stock", 0.0)}
AIMS = {
    "missing_10pct_penalty": "aim ≤ 0.06",
    "draft_ttft_ratio": "aim ≤ 0.2",
    "agent_workflow_speedup": "aim ≥ 2",
    "tokens_identical": "aim true",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. Tokens of a history before its follow-ups; seconds of a round."""

    num_people: int = 40
    history_tokens: int = 1024
    rounds: int = 6
    round_s: float = 30
    draft_repeats: int = 5
    workflow_repeats: int = 4
    document_tokens: int = 1024


QUICK = Plan(
    num_people=36,
    history_tokens=512,
    rounds=2,
    round_s=10,
    draft_repeats=2,
    workflow_repeats=1,
    document_tokens=768,
)


class Bench(Progress):
    """One run over live workers. is_same: whether both engines gave the same answers so far."""

    def __init__(self, plan: Plan, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.plan = plan
        self.workers = workers
        self.people = [f"person{n}" for n in range(plan.num_people)]
        self.is_same = True

    def begin(self) -> None:
        """Begin all conversations on both engines."""
        for worker in self.workers.values():
            worker.call("begin", histories=dict.fromkeys(self.people, self.plan.history_tokens))
            worker.call("settle")

    def measure_people(self) -> dict[str, list[float]]:
        """Return the TTFTs in seconds by arm."""
        ttft_s: dict[str, list[float]] = defaultdict(list)
        answers: dict[tuple[str, str, int], set[tuple[int, ...]]] = defaultdict(set)
        for number in range(self.plan.rounds):
            times = times_of(self.people, ANSWER_WORDS, self.plan.round_s, number)
            for arm in random.Random(number).sample(list(ARMS), len(ARMS)):
                engine, share = ARMS[arm]
                chance = random.Random(f"{arm} {number}")
                # Engines are asked the same; arms of one engine are not, or the second would find the first one's KV.
                seed = f"{number} {arm if arm == 'missing' else ''}"
                asked = self.workers[engine].call(
                    "people",
                    plan=script(times, lambda chance=chance, share=share: chance.random() < share),
                    new_tokens=NEW_TOKENS,
                    max_tokens=ANSWER_TOKENS,
                    seed=seed,
                )
                ttft_s[arm] += [item["ttft_s"] for item in asked]
                for item in asked:
                    answers[seed, item["session"], item["turn"]].add(tuple(item["answer"]))
                self.workers[engine].call("settle")
            medians = {arm: f"{statistics.median(found) * 1e3:.0f}" for arm, found in ttft_s.items()}
            self.say(f"round {number + 1}: median TTFT in ms so far {medians}")
        self.is_same = self.is_same and all(len(same) == 1 for same in answers.values())
        return ttft_s

    def measure_drafts(self) -> dict[bool, list[float]]:
        """Return the TTFTs in seconds of questions that were computed as drafts (True), and of others (False)."""
        times: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(self.plan.draft_repeats):
            for is_typed in in_turn((True, False), repeat):
                tokens = text(DRAFT_TOKENS, "draft", repeat, is_typed)
                tail = text(TAIL_TOKENS, "tail", repeat)
                asked = self.workers["ours"].call("draft", tokens=tokens, tail=tail, is_typed=is_typed)
                times[is_typed].append(asked["ttft_s"])
        return times

    def measure_agents(self) -> dict[str, list[float]]:
        """Return the seconds of a whole workflow by engine."""
        times: dict[str, list[float]] = defaultdict(list)
        for repeat in range(self.plan.workflow_repeats):
            said = []
            for kind in in_turn(("ours", "stock"), repeat):
                worker = self.workers[kind]
                # First every agent reads the documents, which does not count.
                worker.call("agents", stages=self.stages(repeat, 0), max_tokens=ANSWER_TOKENS)
                worker.call("settle")
                stages = [
                    stage for number in range(REVIEW_ROUNDS) for stage in self.stages(repeat, number + 1)
                ]
                result = worker.call("agents", stages=stages, max_tokens=ANSWER_TOKENS)
                times[kind].append(result["elapsed_s"])
                said.append(result["said"])
            self.is_same = self.is_same and said[0] == said[1]
        return times

    def stages(self, repeat: int, number: int) -> list[list[dict[str, Any]]]:
        """Return what each group of agents does in a review round; round 0 has the documents."""
        size = NEW_TOKENS if number else self.plan.document_tokens
        return [
            [
                {"session": f"{name}-{repeat}", "new_tokens": size, "task": f"{name} {number} {repeat}"}
                for name in group
            ]
            for group in GROUPS
        ]


def run(plan: Plan) -> None:
    """Measure everything and report."""
    blocks_of_one = plan.history_tokens // 32 + 8
    num_blocks = max(
        plan.num_people * blocks_of_one // 10, plan.document_tokens // 32 * 2, DRAFT_TOKENS // 32 + 8
    )
    memory = {"num_blocks": num_blocks, "max_model_len": min((num_blocks - 1) * 32, 4096)}
    with alike(("ours", "stock"), ModelShape(), **memory) as workers:
        bench = Bench(plan, workers)
        bench.say(f"{plan.num_people} conversations begin on each engine")
        bench.begin()
        bench.say("people")
        ttft_s = bench.measure_people()
        bench.say("drafts")
        drafts = bench.measure_drafts()
        bench.say("agents")
        workflows = bench.measure_agents()
    show(ttft_s, drafts, workflows, bench.is_same)


def show(
    ttft_s: dict[str, list[float]],
    drafts: dict[bool, list[float]],
    workflows: dict[str, list[float]],
    is_same: bool,
) -> None:
    """Print the report."""
    draft_first_s, no_draft_s = (statistics.median(drafts[is_typed]) for is_typed in (True, False))
    stock_s, ours_s = (statistics.median(workflows[kind]) for kind in ("stock", "ours"))
    result = {
        "missing_10pct_penalty": round(
            statistics.mean(ttft_s["missing"]) / statistics.mean(ttft_s["ours"]) - 1, 4
        ),
        "draft_ttft_ratio": round(draft_first_s / no_draft_s, 3),
        "agent_workflow_speedup": round(stock_s / ours_s, 2),
        "tokens_identical": is_same,
    }
    rows = [
        (f"TTFT of follow-ups, {arm}, ms", spread_ms(times), f"p99 {quantile(times, 0.99) * 1e3:.0f}")
        for arm, times in ttft_s.items()
    ]
    rows += [
        (
            f"question of {DRAFT_TOKENS} tokens, {'draft first' if typed else 'no draft'}, ms",
            spread_ms(times),
            "",
        )
        for typed, times in drafts.items()
    ]
    rows += [(f"workflow, {kind}, s", spread(times), "") for kind, times in workflows.items()]
    rows += figures(result, AIMS)
    medians = {arm: round(quantile(times, 0.5) * 1e3, 1) for arm, times in ttft_s.items()}
    report("Advisories", rows, result | {"ttft_p50_ms": medians})


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="within five minutes")
    parser.add_argument(
        "--source", choices=("device", "disk"), default="device", help="what memory is scarce"
    )
    asked = parser.parse_args()
    if asked.source == "disk":
        run_disk()
    else:
        run(QUICK if asked.quick else Plan())


if __name__ == "__main__":
    main()
