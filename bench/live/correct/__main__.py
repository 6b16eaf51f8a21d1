"""Is each answer right, whatever was reused for it?

    python -m bench.live.correct [--quick] [--only WORDS] [--table FILE]

Servers of their own with tiny models of several families are asked for prompts that are cold, on the device, in host memory and on disk, in batches,
in conversations, under adapters that come and go, and after restarts with something changed. Each token of each answer is compared with what
transformers computes in float32 without any cache; a token whose logit is within 0.02 of the best is right. A last play shows that the
comparison notices one block of a prompt that is another one's. The last line of the output is JSON: `wrong_tokens`; `stale_kv_used`: answers that
used KV of other weights, settings, adapters or tenants; `without_evidence`: cases that did not come to reuse what they are about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.live.correct import plays, table
from bench.live.correct.asking import Serve, in_a_process, prompt_of
from bench.live.correct.checkpoints import folder_of
from bench.live.correct.families import FAMILIES
from bench.live.correct.oracle import Oracle
from bench.live.correct.plays import Checked, Note
from bench.live.shared.report import Progress, figures, options, report

Play = Callable[[Path, Note], Awaitable[Any]]
BY_NAME = {family.name: family for family in FAMILIES}
AIMS = {
    "cases": "aim ≥ 60",
    "wrong_tokens": "aim 0",
    "stale_kv_used": "aim 0",
    "without_evidence": "aim 0",
    "failed_plays": "aim 0",
}
# Layers with a window beside layers without, and pictures: the family in which most can go wrong.
QUICK = "gemma3-vision"


def all_plays(*, is_quick: bool, serve: Serve) -> dict[str, Play]:
    """Return all plays by name, in the order of playing. is_quick: families are played without a second node. serve: how families are served."""
    llama = BY_NAME["llama"]
    found: dict[str, Play] = {
        f"family {family.name}": partial(plays.family_play, family, has_peer=not is_quick, serve=serve)
        for family in FAMILIES
    }
    return found | {
        "changes between two starts": partial(plays.changes_play, llama),
        "adapters in shared KV memory": partial(plays.adapters_play, BY_NAME["gemma3"]),
        "an adapter of the output head": partial(plays.head_play, llama),
        "a replaced adapter": partial(plays.replaced_play, llama),
        "prompts that end inside a character": partial(plays.characters_play, llama),
    }


def notices_a_wrong_block() -> bool:
    """Whether the comparison tells an answer whose prompt had one block of another prompt's."""
    oracle = Oracle(folder_of(BY_NAME["llama"]))
    prompt, other = prompt_of(1, 200), prompt_of(2, 200)
    mixed = [*prompt[:64], *other[64:96], *prompt[96:]]
    answer: list[int] = []
    for _ in range(24):
        answer.append(oracle.next_token([*mixed, *answer]))
    return oracle.num_wrong(mixed, answer) == 0 and oracle.num_wrong(prompt, answer) > 0


async def run(
    chosen: dict[str, Play], at_once: int = 2
) -> tuple[list[Checked], dict[str, Any], dict[str, str]]:
    """Play all, two at a time: a start keeps one core busy.

    Returns:
        The cases; what each play returned that ended without an error; and of each that cannot be played on this processor, what vLLM lacks.
    """
    progress, cases, ended, impossible = Progress(), [], {}, {}
    waiting = iter(chosen.items())
    # vLLM itself computes what these answers should be, and a process holds one engine of it at a time.
    alone = asyncio.Lock()
    computed_by_vllm = {f"family {family.name}" for family in FAMILIES if family.has_own_rounding}

    def note(case: Checked) -> None:
        """Keep a case and print its line."""
        cases.append(case)
        marks = (
            [f"{case.num_wrong} WRONG"] * bool(case.num_wrong) + ["STALE"] * case.is_stale + [case.problem]
        )
        print(f"  {case.play:<32} {case.case:<58} cached {case.num_cached:>4}  {' '.join(marks)}", flush=True)

    async def play_on() -> None:
        """Take the next play and play it, until none is left."""
        for name, play in waiting:
            progress.say(name)
            with tempfile.TemporaryDirectory(prefix="correct-") as scratch:
                try:
                    async with alone if name in computed_by_vllm else contextlib.nullcontext():
                        ended[name] = await play(Path(scratch), note)
                except plays.NotComputable as error:
                    print(f"  {name}: not on this processor, for which vLLM has no {error}", flush=True)
                    impossible[name] = str(error)
                except Exception:
                    traceback.print_exc()

    await asyncio.gather(*(play_on() for _ in range(at_once)))
    return cases, ended, impossible


def of_families(chosen: Iterable[str], cases: Sequence[Checked], ended: Iterable[str]) -> dict[str, int]:
    """Return how many families were played, of how many the server started and every token was right, and how many reuse KV and have it in tiers."""
    played = [family for family in FAMILIES if f"family {family.name}" in chosen]
    started = {family.name for family in played if f"family {family.name}" in ended}
    wrong = {case.play for case in cases if case.num_wrong}
    from_disk = {case.play for case in cases if case.num_cached and "from disk after a restart" in case.case}
    return {
        "families": len(played),
        "started": len(started),
        "equal": len(started - wrong),
        "with_prefix_caching": sum(family.reuses_kv for family in played if family.name in started),
        "with_tiers": len(started & from_disk),
    }


def main(serve: Serve = in_a_process) -> None:
    """Run the bench from the command line. serve: how families are served."""
    parser = options(__doc__, quick="one family: a minute")
    parser.add_argument("--only", default="", help="plays whose name holds these words")
    parser.add_argument(
        "--table",
        type=Path,
        help="play the families alone (with --only, some of them), and write what each has to this file",
    )
    args = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before transformers is imported
    wanted = f"family {QUICK}" if args.quick else f"family {args.only}" if args.table else args.only
    chosen = {
        name: play for name, play in all_plays(is_quick=args.quick, serve=serve).items() if wanted in name
    }
    import torch

    # Measured beside busy servers: a second thread makes the oracle's small sums take ten times as much processor time, as each waits for the other.
    torch.set_num_threads(1)
    is_sensitive = notices_a_wrong_block()
    cases, ended, impossible = asyncio.run(run(chosen))
    if args.table:
        played = [family for family in FAMILIES if f"family {family.name}" in chosen]
        left_out = {name.removeprefix("family "): found for name, found in ended.items()}
        found = {name.removeprefix("family "): why for name, why in impossible.items()}
        table.write(args.table, played, cases, left_out, found)
    found = of_families(chosen, cases, ended) | {
        "cases": len(cases),
        "tokens": sum(case.num_tokens for case in cases),
        "wrong_tokens": sum(case.num_wrong for case in cases),
        "stale_kv_used": sum(case.is_stale for case in cases),
        "without_evidence": sum(bool(case.problem) for case in cases),
        "failed_plays": len(chosen) - len(ended) - len(impossible),
        "not_on_this_processor": len(impossible),
        "notices_a_wrong_block": is_sensitive,
    }
    report("Right answers", figures(found, AIMS), found)


if __name__ == "__main__":
    main()
