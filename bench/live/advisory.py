"""What advisories are worth: people who read and type, pasted drafts, and agents that call each other, with too little device memory.

    python -m bench.live.advisory [--quick] [--source device | disk]

`--source disk` is another bench: see `bench.live.advisory_disk`. The rest is of the other one.

Engines, each in a process of its own, all alive at once and taking turns: our node; an oracle (our node without tiers, whose device holds
everything); stock vLLM (prefix cache, statistics off) with our node's device memory, a tenth of what the conversations need. Model:
`bench.live.models`.

People read an answer and type a question of ten words (`bench.live.people`); an advisory goes out when they begin to
type. A round begins in the middle of their reading and typing. Arms on our node: all advisories;
none; one in ten missing; nine wrong ones for each right one, from another key, about conversations that nobody goes on with. Arms take turns
in random order, and each begins with the same histories.

The last line is JSON. `followup_ttft_vs_oracle_p50`, `_p99`: ours with advisories over the oracle's; `followup_ttft_vs_stock_p50`: over stock
vLLM's. `missing_10pct_penalty`, `wrong_90pct_penalty_others`: mean TTFT of that arm over the arm with all advisories, less 1.
`draft_ttft_ratio`: TTFT of a pasted question of 2,000 tokens that was computed as a draft before Enter, over the same without.
`advisory_loop_ms`: processor time of the event loop for each advisory, from the call to its end. `agent_workflow_speedup`: stock vLLM's time over
ours for an architect, three engineers and QA in three review rounds over shared documents. `precision`: advisories whose request came over all
that ended, in the arm with right ones only; `wasted_bytes_share`: of all bytes moved in the arm with nine wrong ones, those
moved for nothing. `tokens_identical`: the same turns of the same conversations got the same tokens everywhere.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.live.advisory_disk import run_disk
from bench.live.models import ModelShape, model_folder
from bench.live.peers.client import Worker
from bench.live.peers.engine import Settings
from bench.live.peers.play import text
from bench.live.people import times_of
from bench.live.report import Progress, figures, options, report, spread
from bench.measures import quantile

# A paragraph; the engines write its first tokens only, so that TTFT is what counts.
ANSWER_WORDS = 40
NEW_TOKENS, ANSWER_TOKENS = 32, 8
WRONG_FOR_EACH = 9
DRAFT_TOKENS, TAIL_TOKENS = 2000, 8
ENGINEERS, REVIEW_ROUNDS = 3, 3
ARMS = ("oracle", "ours", "none", "missing", "wrong", "stock")
AIMS = {
    "followup_ttft_vs_oracle_p50": "aim ≤ 1.1",
    "followup_ttft_vs_oracle_p99": "aim ≤ 1.3",
    "missing_10pct_penalty": "aim ≤ 0.06",
    "wrong_90pct_penalty_others": "aim ≤ 0.03",
    "draft_ttft_ratio": "aim ≤ 0.2",
    "advisory_loop_ms": "aim ≤ 1",
    "agent_workflow_speedup": "aim ≥ 2",
    "tokens_identical": "aim true",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; as it is, by the whole bench. Tokens of a history before its follow-ups; seconds of a round."""

    num_people: int = 40
    num_idle: int = 20
    history_tokens: int = 1024
    rounds: int = 6
    round_s: float = 30
    draft_repeats: int = 5
    workflow_repeats: int = 4
    document_tokens: int = 1024


QUICK = Plan(
    num_people=36,
    num_idle=8,
    history_tokens=512,
    rounds=2,
    round_s=10,
    draft_repeats=2,
    workflow_repeats=1,
    document_tokens=768,
)


class Bench(Progress):
    """One run over live workers."""

    def __init__(self, plan: Plan, workers: dict[str, Worker]) -> None:
        super().__init__()
        self.plan = plan
        self.workers = workers
        self.people = [f"person{n}" for n in range(plan.num_people)]
        self.idle = [f"idle{n}" for n in range(plan.num_idle)]
        self.agents = ["architect", *(f"engineer{n}" for n in range(ENGINEERS)), "qa"]

    def begin(self) -> None:
        for kind, worker in self.workers.items():
            idle = self.idle if kind == "ours" else []
            worker.call("begin", histories=dict.fromkeys([*self.people, *idle], self.plan.history_tokens))
            worker.call("settle")

    # -- people ------------------------------------------------------------------------------------------------------

    def measure_people(self) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]], bool]:
        """TTFTs in seconds and accounts of advisories by arm; whether all agreed about the tokens."""
        ttft_s: dict[str, list[float]] = defaultdict(list)
        accounts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        answers: dict[tuple[str, str, int], set[tuple[int, ...]]] = defaultdict(set)
        for number in range(self.plan.rounds):
            for arm in random.Random(number).sample(ARMS, len(ARMS)):
                worker = self.workers[arm if arm in self.workers else "ours"]
                # Engines are asked the same; arms of one engine are not, or the second would find the first one's KV.
                seed = f"{number} {arm if worker is self.workers['ours'] and arm != 'ours' else ''}"
                asked = worker.call(
                    "people",
                    plan=self.script(arm, number),
                    new_tokens=NEW_TOKENS,
                    max_tokens=ANSWER_TOKENS,
                    seed=seed,
                )
                ttft_s[arm] += [item["ttft_s"] for item in asked]
                for item in asked:
                    answers[seed, item["session"], item["turn"]].add(tuple(item["answer"]))
                if worker is self.workers["ours"]:
                    accounts[arm] += worker.call("accounts")
                worker.call("settle")
            medians = {arm: f"{statistics.median(ttft_s[arm]) * 1e3:.0f}" for arm in ARMS}
            print(f"  round {number + 1}: median TTFT in ms so far {medians}", flush=True)
        return ttft_s, accounts, all(len(same) == 1 for same in answers.values())

    def script(self, arm: str, number: int) -> list[dict[str, Any]]:
        """Everybody's times in one round: the same for each arm, but for what is advised."""
        doubt = random.Random(f"{arm} {number}")
        script = []
        for times in times_of(self.people, ANSWER_WORDS, self.plan.round_s, number):
            if arm == "none":
                leads: list[float | None] = [None] * len(times.leads_s)
            else:
                leads = [
                    None if arm == "missing" and doubt.random() < 0.1 else lead for lead in times.leads_s
                ]
            wrong = [doubt.choices(self.idle, k=WRONG_FOR_EACH) if arm == "wrong" else [] for _ in leads]
            script.append(
                {"session": times.session, "asks_s": times.asks_s, "leads_s": leads, "wrong": wrong}
            )
        return script

    # -- drafts, agents, cost ----------------------------------------------------------------------------------------

    def measure_drafts(self) -> dict[bool, list[float]]:
        times: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(self.plan.draft_repeats):
            for is_typed in (repeat % 2 == 0, repeat % 2 == 1):
                tokens = text(DRAFT_TOKENS, "draft", repeat, is_typed)
                tail = text(TAIL_TOKENS, "tail", repeat)
                asked = self.workers["ours"].call("draft", tokens=tokens, tail=tail, is_typed=is_typed)
                times[is_typed].append(asked["ttft_s"])
        return times

    def measure_agents(self) -> tuple[dict[str, list[float]], bool]:
        """Seconds of a whole workflow, and whether both said the same."""
        times: dict[str, list[float]] = defaultdict(list)
        is_same = True
        for repeat in range(self.plan.workflow_repeats):
            said = {}
            for kind in ("ours", "stock") if repeat % 2 == 0 else ("stock", "ours"):
                worker = self.workers[kind]
                names = {agent: f"{agent}-{repeat}" for agent in self.agents}
                stages = self.stages(names, repeat)
                worker.call(
                    "agents", stages=stages[:3], max_tokens=ANSWER_TOKENS
                )  # everybody reads the documents
                worker.call("settle")
                result = worker.call("agents", stages=stages[3:], max_tokens=ANSWER_TOKENS)
                times[kind].append(result["elapsed_s"])
                said[kind] = result["said"]
            is_same = is_same and said["ours"] == said["stock"]
        return times, is_same

    def stages(self, names: dict[str, str], repeat: int) -> list[list[dict[str, Any]]]:
        """Architect, engineers, QA; first with the documents, then the review rounds."""
        groups = [["architect"], [name for name in self.agents if name.startswith("engineer")], ["qa"]]
        stages = []
        for number in range(1 + REVIEW_ROUNDS):
            for group in groups:
                size = self.plan.document_tokens if number == 0 else NEW_TOKENS
                stages.append(
                    [
                        {
                            "session": names[agent],
                            "new_tokens": size,
                            "task": f"{agent} {number} {repeat}",
                        }
                        for agent in group
                    ]
                )
        return stages


def start_workers(plan: Plan, shape: ModelShape, folder: Path, stack: ExitStack) -> dict[str, Worker]:
    blocks_of_one = plan.history_tokens // 32 + 8
    small = max(plan.num_people * blocks_of_one // 10, plan.document_tokens // 32 * 2, DRAFT_TOKENS // 32 + 8)
    all_blocks = (plan.num_people + 2) * (blocks_of_one + 16)
    workers = {}
    for kind, engine, num_blocks in (
        ("ours", "ours", small),
        ("oracle", "ours_off", all_blocks),
        ("stock", "stock", small),
    ):
        own = folder / kind
        own.mkdir()
        settings = Settings(
            model=str(model_folder(shape)),
            dtype=shape.dtype,
            folder=str(own),
            num_blocks=num_blocks,
            max_model_len=min((small - 1) * 32, 4096),
        )
        workers[kind] = stack.enter_context(Worker(engine, settings, folder))
    described = {kind: worker.wait_ready() for kind, worker in workers.items()}
    print(
        f"  device blocks: { {kind: about['num_blocks'] for kind, about in described.items()} }", flush=True
    )
    return workers


def run(plan: Plan) -> None:
    shape = ModelShape()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        print(f"starting engines on {shape.name} …", flush=True)
        bench = Bench(plan, start_workers(plan, shape, folder, stack))
        bench.say(f"{plan.num_people} conversations begin on each engine")
        bench.begin()
        bench.say("people")
        ttft_s, accounts, is_same = bench.measure_people()
        bench.say("drafts")
        drafts = bench.measure_drafts()
        bench.say("agents")
        workflows, is_same_workflow = bench.measure_agents()
        bench.say("cost of an advisory")
        loop_s = bench.workers["ours"].call("advisory_cost", sessions=bench.people * 12)
    show(ttft_s, accounts, drafts, workflows, loop_s, is_same and is_same_workflow)


def show(
    ttft_s: dict[str, list[float]],
    accounts: dict[str, list[dict[str, Any]]],
    drafts: dict[bool, list[float]],
    workflows: dict[str, list[float]],
    loop_s: float,
    is_same: bool,
) -> None:
    def mean(arm: str) -> float:
        return statistics.mean(ttft_s[arm])

    def ratio(arm: str, share: float) -> float:
        return round(quantile(ttft_s["ours"], share) / quantile(ttft_s[arm], share), 3)

    result = {
        "followup_ttft_vs_oracle_p50": ratio("oracle", 0.5),
        "followup_ttft_vs_oracle_p99": ratio("oracle", 0.99),
        "followup_ttft_vs_stock_p50": ratio("stock", 0.5),
        "missing_10pct_penalty": round(mean("missing") / mean("ours") - 1, 4),
        "wrong_90pct_penalty_others": round(mean("wrong") / mean("ours") - 1, 4),
        "draft_ttft_ratio": round(statistics.median(drafts[True]) / statistics.median(drafts[False]), 3),
        "advisory_loop_ms": round(loop_s * 1e3, 3),
        "agent_workflow_speedup": round(
            statistics.median(workflows["stock"]) / statistics.median(workflows["ours"]), 2
        ),
        "precision": share_of(accounts["ours"], ("hit", "late")),
        "wasted_bytes_share": wasted_share(accounts["wrong"]),
        "tokens_identical": is_same,
    }
    rows = [
        (
            f"TTFT of follow-ups, {arm}, ms",
            spread([t * 1e3 for t in ttft_s[arm]]),
            f"p99 {quantile(ttft_s[arm], 0.99) * 1e3:.0f}",
        )
        for arm in ARMS
    ]
    rows += [
        (
            f"question of {DRAFT_TOKENS} tokens, {'draft first' if typed else 'no draft'}, ms",
            spread([t * 1e3 for t in drafts[typed]]),
            "",
        )
        for typed in (False, True)
    ]
    rows += [(f"workflow, {kind}, s", spread(workflows[kind]), "") for kind in ("stock", "ours")]
    outcomes = {arm: count_states(accounts[arm]) for arm in ("ours", "missing", "wrong")}
    rows += [(f"advisories, {arm}", str(counts), "") for arm, counts in outcomes.items()]
    rows += figures(result, AIMS)
    extra = {
        "standard_error": {arm: round(relative_error(ttft_s[arm]), 4) for arm in ARMS},
        "ttft_p50_ms": {arm: round(quantile(ttft_s[arm], 0.5) * 1e3, 1) for arm in ARMS},
        "outcomes": outcomes,
    }
    report("Advisories", rows, result | extra)


def relative_error(values: Sequence[float]) -> float:
    """Standard error of the mean, as a share of it."""
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.mean(values)


def count_states(accounts: Sequence[dict[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for account in accounts:
        counts[account["state"]] += 1
    return dict(counts)


def share_of(accounts: Sequence[dict[str, Any]], states: Sequence[str]) -> float | None:
    """Of the advisories that were not taken back."""
    ended = [account for account in accounts if account["state"] in ("hit", "late", "wasted", "expired")]
    return round(sum(a["state"] in states for a in ended) / len(ended), 3) if ended else None


def wasted_share(accounts: Sequence[dict[str, Any]]) -> float | None:
    moved = [(a["state"], a["host_bytes"] + a["disk_bytes"] + a["peer_bytes"]) for a in accounts]
    total = sum(num_bytes for _, num_bytes in moved)
    return round(sum(n for state, n in moved if state not in ("hit", "late")) / total, 3) if total else None


def main() -> None:
    parser = options(__doc__, quick="within five minutes; `--source disk` within ten")
    parser.add_argument(
        "--source", choices=("device", "disk"), default="device", help="what memory is scarce"
    )
    asked = parser.parse_args()
    if asked.source == "disk":
        run_disk(asked.quick)
    else:
        run(QUICK if asked.quick else Plan())


if __name__ == "__main__":
    main()
