"""One model split over two ranks: is each answer right, whatever was reused for it, and does the server outlive a rank?

    python -m bench.live.ranks [--quick] [--only FAMILY]

The plays of `bench.live.correct` are played by servers with --tensor-parallel-size 2, and compared with what transformers computes in one process.
Then a rank is killed while it answers in a conversation. The last line of the output is JSON:

  tokens_identical       no token of any case is another one's
  host_tokens            share of a prompt's tokens that came from host memory, of those that can come (the last block is computed)
  disk_tokens            the same from disk, after a restart
  rank_killed_recovered  the answer under way ended with an error that says to ask again, and the next one was right and found its KV in host memory
  lost_turns             stored turns that the conversation has lost by it
  orphans                processes of the server that outlived it
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.live.correct import plays
from bench.live.correct.__main__ import BY_NAME, run
from bench.live.correct.asking import Asker, Refused, prompt_of, serving
from bench.live.correct.checkpoints import folder_of
from bench.live.correct.oracle import Oracle
from bench.live.correct.plays import TWO_RANKS, Checked, Judge, Note
from bench.live.shared.report import figures, options, report

# Full attention, windows beside it, whole experts on each rank, recurrent layers, pictures.
FAMILIES = {
    "llama": (),
    "gemma3": (),
    "qwen3-moe": ("--enable-expert-parallel",),
    "granite4": (),
    "qwen3-vl": (),
}
QUICK = ("llama",)
KILLED = "a rank that is killed"
UNSEEN = {"rank_killed_recovered": False, "lost_turns": -1, "orphans": -1}
"""What is told of that play where it has failed."""
BLOCK_TOKENS = 32
RECOVERY_S, ORPHANS_S = 180.0, 20.0
AIMS = {
    "tokens_identical": "aim true",
    "cases": "aim ≥ 10",
    "host_tokens": "aim ≥ 0.95",
    "disk_tokens": "aim ≥ 0.95",
    "rank_killed_recovered": "aim true",
    "lost_turns": "aim 0",
    "orphans": "aim 0",
}


async def killed_play(scratch: Path, note: Note) -> dict[str, Any]:
    """Kill a rank while it answers in a conversation, ask again, kill one while nothing runs, and stop the server. Returns what came of it."""
    family = BY_NAME["llama"]
    judge = Judge(KILLED, Oracle(folder_of(family)), {}, note)
    async with serving(
        folder_of(family), scratch / "data", TWO_RANKS, kv_token_bytes=family.kv_token_bytes
    ) as server:
        family_of = psutil.Process(server.pid).children(recursive=True)
        judge.check("before", await server.complete(prompt_of(1)), may_reuse=False)
        messages = plays.turn("Begin. " * 60)
        first = await server.chat(messages, session="kept")
        judge.check("a first turn", first)
        before = await _stored(server, "kept")
        messages = plays.gone_on(messages, first)
        is_told = await _kill_while_it_answers(server, messages)
        started_s = time.monotonic()
        again = await _until_answered(server, messages)
        recovery_s = round(time.monotonic() - started_s, 1)
        judge.check("the next turn, afterwards", again, must_reuse=True)
        judge.check("from host memory, afterwards", await server.complete(prompt_of(1)), must_reuse=True)
        await _kill_while_nothing_runs(server)
        judge.check("after a second one", await server.complete(prompt_of(1)), must_reuse=True)
        kept = await _stored(server, "kept")
        family_of += psutil.Process(server.pid).children(recursive=True)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family_of, ORPHANS_S)
    return {
        "recovery_s": recovery_s,
        "lost_turns": len([each for each in before if each not in kept]),
        "rank_killed_recovered": is_told and again.num_cached > 0,
        "orphans": len(alive),
    }


async def _kill_while_it_answers(server: Asker, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the answer ended with an error that says to ask again."""
    asked = asyncio.create_task(server.chat(messages, session="kept", max_tokens=300, ignore_eos=True))
    await asyncio.sleep(0.3)
    os.kill(_ranks(server)[-1].pid, signal.SIGKILL)
    try:
        await asked
    except Refused as refused:
        return " 503 " in str(refused) or "again" in str(refused)
    return False


async def _kill_while_nothing_runs(server: Asker) -> None:
    """Kill a rank, and return once the server has replaced its engine. Raises TimeoutError after RECOVERY_S."""
    [node] = (await server.call("GET", "/v1/nodes"))["nodes"]
    os.kill(_ranks(server)[0].pid, signal.SIGKILL)
    async with asyncio.timeout(RECOVERY_S):
        while True:
            [now] = (await server.call("GET", "/v1/nodes"))["nodes"]
            if now["num_rebuilds"] > node["num_rebuilds"] and now["state"] == "ready":
                return
            await asyncio.sleep(0.2)


def _ranks(server: Asker) -> list[psutil.Process]:
    alive = [
        child for child in psutil.Process(server.pid).children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    ranks = {" ".join(child.cmdline()): child for child in alive}
    return [child for title, child in sorted(ranks.items()) if "Worker_TP" in title]


async def _until_answered(server: Asker, messages: Sequence[Mapping[str, Any]]) -> Any:
    """Ask until the server has replaced its engine. Raises TimeoutError after RECOVERY_S."""
    async with asyncio.timeout(RECOVERY_S):
        while True:
            try:
                return await server.chat(messages, session="kept")
            except Refused:
                await asyncio.sleep(0.5)


async def _stored(server: Asker, session: str) -> list[str]:
    found = await server.call("GET", f"/api/sessions/{session}")
    return [f"{turn['id']} {turn['content']}" for turn in found["turns"]]


def _share(cases: Sequence[Checked], case: str) -> float:
    """Return the largest share of a prompt that a case of this name found in the cache, relative to the most that can be found.

    The largest, as the server computes a part that it predicts to compute sooner than to copy: such a case is asked again.
    """
    own = [each for each in cases if each.case.strip() == case and each.num_cached]
    found = [each.num_cached / ((each.num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS) for each in own]
    return round(max(found, default=0.0), 3)


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="one family: two minutes")
    parser.add_argument("--only", default="", help="a family to play, in place of those above")
    args = parser.parse_args()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before transformers is imported
    names = [args.only] if args.only else QUICK if args.quick else tuple(FAMILIES)
    chosen: dict[str, Any] = {}
    for name in names:
        flags = [TWO_RANKS, *FAMILIES.get(name, ())]
        played = partial(plays.family_play, BY_NAME[name], has_peer=not args.quick, flags=flags)
        chosen[f"family {name}"] = played
    chosen[KILLED] = killed_play
    import torch

    torch.set_num_threads(1)
    cases, ended, _ = asyncio.run(run(chosen, at_once=1))
    num_wrong = sum(case.num_wrong for case in cases)
    found = {
        "tokens_identical": num_wrong == 0 and not any(case.is_stale for case in cases),
        "cases": len(cases),
        "families": len(names),
        "wrong_tokens": num_wrong,
        "without_evidence": sum(bool(case.problem) for case in cases),
        "failed_plays": len(chosen) - len(ended),
        "host_tokens": _share(cases, "from host memory"),
        "disk_tokens": _share(cases, "from disk after a restart"),
        **UNSEEN,
        **ended.get(KILLED, {}),
    }
    report("Two ranks", figures(found, AIMS), found)


if __name__ == "__main__":
    main()
