"""Agents over clients that know nothing of Overture: is each loop one session, and what is that worth? Against the same server with names, and plain.

    python -m bench.live.agents [--quick] [--rounds N]

Loops with tools over OpenAI's SDK (chat completions, responses), Anthropic's, and the OpenAI Agents SDK (in an environment of its own, which
is made at first use; without a package index its programs are left out, and `framework` is empty). Each sends its whole conversation with
every call, no header, no hook. Programs run at once, with device memory for a few of them; two have equal first messages, one goes on in two branches
side by side, one calls a helper under the same system prompt, one replaces its history by a summary (`bench/live/agents/programs.py`).

Arms, each a server of its own with the demo model and the same device memory, take turns round by round:
  unnamed  ours
  named    ours, each conversation with a name (X-Session-Id)
  plain    vLLM's queue and prefix cache; KV that leaves the device is lost, and nothing is announced

The last line is JSON. `sessions_recognised`: of calls after a conversation's first one, those that were given its session; a branch, and a history
that was replaced, begin a conversation. `wrongly_joined`: calls that were given another conversation's session. `cached_share_vs_named`: prompt
tokens found in a cache over those of `named`. `ttft_p50_vs_plain`: median TTFT of follow-up calls over that of `plain`. `program_s_vs_plain`: mean
time of a whole program over that of `plain`; a program may wait at first, so that those under way keep their KV. `run_tokens`: prompt tokens by arm
that stayed on the device from turn to turn, came back, were computed twice or were new, warm-up included. `intervals`: at 95%, rounds drawn
anew. The Agents SDK does not stream here: its calls count for sessions and for tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.intervals import Aim, interval, quantile_ratio, quantile_ratio_interval, verdict
from bench.live.agents.judging import Recognising, ToldCall, judge
from bench.live.agents.loops import LOOPS, MAX_TOKENS, MODEL, play
from bench.live.agents.programs import LiveProgram, programs
from bench.live.shared.models import cache_folder, write_once
from bench.live.shared.report import ROOT, Progress, figures, options, report, spread, spread_ms
from bench.live.shared.rounds import in_turn
from bench.live.shared.serving import QUIET_OPENMP, OvertureServer, ServerProcess, samples

# Of the demo model's 4,096 bytes of KV a token: 6,144 tokens on the device, 32,768 in host memory. Chosen: a program has up to 2,500, so that the
# device holds a fifth of them and host memory all.
KV_TOKEN_BYTES, DEVICE_TOKENS, HOST_TOKENS = 4096, 6144, 32768
SMALL = ("--kv-disk-gib=0", "--max-num-seqs=16", f"--kv-cache-gib={DEVICE_TOKENS * KV_TOKEN_BYTES / 2**30}")
OURS = (f"--kv-host-gib={HOST_TOKENS * KV_TOKEN_BYTES / 2**30}",)
ARMS = {"unnamed": OURS, "named": OURS, "plain": ("--kv-host-gib=0", "--scheduling-policy=vllm")}
NUM_ROUNDS, QUICK_ROUNDS = 12, 6
# No round of the quick bench begins after this. Chosen: ten minutes, less a round and the servers' end.
QUICK_END_S = 480.0
RUN_TOKENS = "overture_agent_run_tokens_total"
FRAMEWORK, FRAMEWORK_TIMEOUT_S = Path(__file__).with_name("framework.py"), 300.0
REQUIREMENTS, INSTALL_TIMEOUT_S = ROOT / "requirements" / "clients" / "openai-agents.txt", 300.0
AIMS = {
    "sessions_recognised": Aim(0.98),
    "wrongly_joined": Aim(0, is_most=True),
    "cached_share_vs_named": Aim(0.98),
    "ttft_p50_vs_plain": Aim(0.6, is_most=True),
}


class Played(NamedTuple):
    """One round of an arm: its calls, and the seconds of each program of an SDK."""

    calls: list[ToldCall]
    program_s: list[float]

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were found in a cache."""
        return sum(call.num_cached for call in self.calls)

    @property
    def ttft_s(self) -> list[float]:
        """TTFT of all streamed calls after the first of their conversation."""
        return [call.ttft_s for call in self.calls if call.number and call.ttft_s is not None]


def framework_python(progress: Progress) -> Path | None:
    """Return an interpreter that has the OpenAI Agents SDK, in an environment that is made at first use; None where it cannot be installed."""
    folder = cache_folder() / f"openai-agents-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"

    def install(written: Path) -> None:
        """Make the environment."""
        progress.say(f"installing {REQUIREMENTS.name}")
        own = [sys.executable, "-m", "venv", str(written)]
        pip = [str(written / "bin" / "python"), *"-m pip install -q --no-compile --no-input -r".split()]
        for command in (own, [*pip, str(REQUIREMENTS)]):
            subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_TIMEOUT_S)

    try:
        write_once(folder, "pyvenv.cfg", install)
    except (subprocess.SubprocessError, OSError) as error:
        progress.say(f"without a framework: {error}")
        return None
    return folder / "bin" / "python"


async def play_framework(
    python: Path, url: str, own: Sequence[LiveProgram], *, is_named: bool
) -> list[ToldCall]:
    """Play programs by the framework. Raises RuntimeError if it fails."""
    wish = {"url": url, "model": MODEL, "max_tokens": MAX_TOKENS, "is_named": is_named}
    wish["programs"] = msgspec.to_builtins(own)
    process = await asyncio.create_subprocess_exec(
        *(python, FRAMEWORK), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(FRAMEWORK_TIMEOUT_S):
            out, problems = await process.communicate(json.dumps(wish).encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the framework's programs failed: {problems.decode()[-500:]}")
    return [msgspec.json.decode(line, type=ToldCall) for line in out.splitlines()]


async def play_round(server: ServerProcess, number: int, python: Path | None, *, is_named: bool) -> Played:
    """Play a round's programs at once on one server."""
    played = Played([], [])
    made = programs(number, has_framework=python is not None)

    async def one(program: LiveProgram) -> None:
        """Play one program at its time."""
        await asyncio.sleep(program.at_s)
        began_s = time.perf_counter()
        await play(LOOPS[program.api](server.url, program, played.calls, is_named=is_named))
        played.program_s.append(time.perf_counter() - began_s)

    async with asyncio.TaskGroup() as group:
        for program in made:
            if program.api != "framework":
                group.create_task(one(program))
        if python is not None:
            own = [program for program in made if program.api == "framework"]
            asked = group.create_task(play_framework(python, server.url, own, is_named=is_named))
    if python is not None:
        played.calls.extend(asked.result())
    return played


def run_tokens(server: ServerProcess) -> dict[str, int]:
    """Return the prompt tokens of all agents' runs so far by what became of their KV."""
    return {each.labels["outcome"]: int(each.value) for each in samples(server.url, RUN_TOKENS)}


async def measure(
    num_rounds: int, end_s: float, progress: Progress, python: Path | None
) -> tuple[dict[str, list[Played]], dict[str, dict[str, int]]]:
    """Return the rounds of each arm, and what became of its prompts' KV. The round before them warms the servers up and does not count."""
    found: dict[str, list[Played]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overture-bench-")))
        servers = {
            arm: stack.enter_context(
                OvertureServer(
                    folder / f"{arm}.log", *SMALL, *flags, f"--data-dir={folder / arm}", **QUIET_OPENMP
                )
            )
            for arm, flags in ARMS.items()
        }
        for server in servers.values():
            server.wait(server.is_ready)
        progress.say("the servers are ready")
        for number in range(-1, num_rounds):
            if progress.elapsed_s > end_s:
                break
            for arm in in_turn(list(ARMS), number):
                played = await play_round(servers[arm], number, python, is_named=arm == "named")
                if number >= 0:
                    found[arm].append(played)
            progress.say(f"round {number + 1}: {said(found)}" if number >= 0 else "warmed up")
        return found, {arm: run_tokens(server) for arm, server in servers.items()}


def said(found: dict[str, list[Played]]) -> str:
    """Return the median TTFT of follow-ups by arm so far."""
    return ", ".join(
        f"{arm} {statistics.median(time_s for each in rounds for time_s in each.ttft_s) * 1e3:.0f} ms"
        for arm, rounds in found.items()
    )


def show(found: dict[str, list[Played]], tokens: dict[str, dict[str, int]], python: Path | None) -> None:
    """Print the report."""
    unnamed, named, plain = (found[arm] for arm in ARMS)
    judged = [judge(each.calls) for each in unnamed]
    recognised = Recognising(*(sum(part) for part in zip(*judged, strict=True)))
    shares = [each.num_recognised / each.num_followups for each in judged]
    cached = [one.num_cached / other.num_cached for one, other in zip(unnamed, named, strict=True)]
    ttft = [each.ttft_s for each in unnamed], [each.ttft_s for each in plain]
    result: dict[str, Any] = {
        "sessions_recognised": round(recognised.num_recognised / recognised.num_followups, 4),
        "wrongly_joined": recognised.num_wrong,
        "cached_share_vs_named": round(
            sum(each.num_cached for each in unnamed) / sum(each.num_cached for each in named), 4
        ),
        "ttft_p50_vs_plain": round(quantile_ratio(*ttft, 0.5), 3),
    }
    intervals = {
        "sessions_recognised": interval(shares),
        "cached_share_vs_named": interval(cached),
        "ttft_p50_vs_plain": quantile_ratio_interval(*ttft, 0.5),
    }
    verdicts = {name: verdict(each, AIMS[name]) for name, each in intervals.items()}
    program_s = {
        arm: [time_s for each in rounds for time_s in each.program_s] for arm, rounds in found.items()
    }
    rows = [
        (f"TTFT of follow-ups, {arm}, ms", spread_ms(time_s for each in rounds for time_s in each.ttft_s), "")
        for arm, rounds in found.items()
    ]
    rows += [(f"a program, {arm}, s", spread(times), "") for arm, times in program_s.items()]
    rows += [
        (f"tokens found cached a round, {arm}", spread([each.num_cached for each in rounds]), "")
        for arm, rounds in found.items()
    ]
    rows += figures(result, {name: str(aim) for name, aim in AIMS.items()})
    more = {
        "program_s_vs_plain": round(
            statistics.fmean(program_s["unnamed"]) / statistics.fmean(program_s["plain"]), 3
        ),
        "num_rounds": len(unnamed),
        "num_calls": sum(len(each.calls) for each in unnamed),
        "run_tokens": tokens,
        "framework": "openai-agents" if python is not None else "",
        "intervals": intervals,
        "verdicts": verdicts,
    }
    report("Agents without names", rows, result | more)


def main() -> None:
    """Run the bench from the command line."""
    parser = options(__doc__, quick="within ten minutes")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    args = parser.parse_args()
    progress = Progress()
    python = framework_python(progress)
    num_rounds = args.rounds or (QUICK_ROUNDS if args.quick else NUM_ROUNDS)
    end_s = QUICK_END_S if args.quick else float("inf")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would outdo --kv-cache-gib
    show(*asyncio.run(measure(num_rounds, end_s, progress, python)), python)


if __name__ == "__main__":
    main()
