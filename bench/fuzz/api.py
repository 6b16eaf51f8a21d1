"""Fuzz the HTTP API of a real server: Schemathesis by /openapi.json, and malformed requests as raw bytes.

    python -m bench.fuzz.api [--requests N] [--seed S]

A server with the demo model and small limits is started on a loopback port and stopped at the end. First come the raw cases (`bench.fuzz.raw`),
then Schemathesis in rounds until the server has counted N requests:

- every operation but /v1/responses: examples of the document, boundary values of each parameter and field (right and wrong ones), random bodies
  (right and wrong ones), and chains such as reading a session that was made before;
- /v1/responses by examples and random bodies (its 300 schemas would give 10,000 boundary values alone);
- random bodies for everything, with other seeds, until there are enough.

Checked: no 5xx; statuses, content types and bodies as the document says; methods refused with Allow. Not checked is whether the
server refuses whatever the document's schema does: vLLM reads numbers that are written as strings and passes over unknown fields on purpose, and
refuses some bodies of the right form (a prompt that is too long, a seed out of range).

The last line is JSON. `requests`: as the server counted them; of `raw_cases` it counts those that are HTTP at all. `server_errors`: 5xx among
them, and raw cases without any answer. `undocumented_status`: kinds of answers whose status or content type the document lacks. `failures`: all
kinds of failures, those included, and raw cases that were answered wrongly.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.fuzz.raw import cases, play
from bench.live.shared.report import ROOT, Progress, options
from bench.live.shared.serving import demo_server, samples

KEY = "ov-key-of-the-fuzzed-server-only"
# Small, so that an answer without max_tokens ends soon; the longest body is what the raw cases need.
LIMITS = "--max-model-len 96 --kv-cache-gib 0.25 --kv-host-gib 0.25 --kv-disk-gib 0 --max-num-seqs 16 --allow-adapter-loading".split()
# A round that takes longer has failed. Measured: 125 s for the first on two busy cores.
ROUND_WITHIN_S = 420.0
FIRST_EXAMPLES, RESPONSES_EXAMPLES, MORE_EXAMPLES = 30, 300, 150
LONGEST_CALL_S = 60.0
RESPONSES = "/v1/responses"
# The last: who guesses keys is answered 429 after a while, which the check takes for a key that was let in.
NOT_CHECKED = "negative_data_rejection,positive_data_acceptance,ignored_auth"
UNDOCUMENTED = ("UndefinedStatusCode", "UndefinedContentType", "MissingContentType")


class Target(NamedTuple):
    """A server and a key that it takes."""

    url: str
    key: str


class Round(NamedTuple):
    """One run of Schemathesis. examples: random bodies of each operation."""

    name: str
    examples: int
    phases: str = "examples,fuzzing"
    filters: tuple[str, ...] = ()


@dataclass
class Tally:
    """The findings: kinds of failures with the operations that have them."""

    num_raw: int = 0
    num_unanswered: int = 0
    failures: set[str] = field(default_factory=set)
    undocumented: set[str] = field(default_factory=set)

    def add_report(self, report: dict[str, Any]) -> None:
        """Take in a report of Schemathesis (`--report json`)."""
        for failure in report["failures"]:
            kinds = {
                f"{operation} {failure['type']}: {failure['title']}" for operation in failure["operations"]
            }
            self.failures |= kinds
            self.undocumented |= kinds if failure["type"] in UNDOCUMENTED else set()
        self.failures |= {f"error: {json.dumps(error)[:200]}" for error in report["errors"]}


# -- the server ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started() -> Iterator[Target]:
    """A server of our own on a free loopback port, until the block ends. Raises SystemExit where it dies meanwhile."""
    flags = ["--operator-key", KEY, "--log-level", "error", *LIMITS]
    with demo_server(*flags, VLLM_LOGGING_LEVEL="CRITICAL", VLLM_MAX_N_SEQUENCES="4") as server:
        yield Target(server.url, KEY)
        if (status := server.process.poll()) is not None:
            raise SystemExit(f"the server died with status {status}")


def counted(target: Target) -> Counter[tuple[str, int]]:
    """Requests by route and status, as the server has counted them."""
    found = samples(target.url, "overture_http_requests_total", target.key)
    return Counter({(each.labels["route"], int(each.labels["status"])): int(each.value) for each in found})


# -- the work --------------------------------------------------------------------------------------------------------


def send_raw(target: Target, tally: Tally) -> None:
    """Send all raw cases, one after the other."""
    port = urlsplit(target.url).port
    assert port is not None
    for case in cases(target.key):
        outcome = play(port, case)
        tally.num_raw += 1
        if outcome.status == 0:
            tally.num_unanswered += 1
        if not outcome.is_fine:
            tally.failures.add(f"raw: {case.name}: {outcome.status}")


def run_round(target: Target, step: Round, seed: int, hooks: str | None = None) -> dict[str, Any]:
    """Run Schemathesis once; returns its report. hooks: a module with some. Raises SystemExit when it gives none."""
    environment = os.environ | ({"SCHEMATHESIS_HOOKS": hooks, "PYTHONPATH": str(ROOT)} if hooks else {})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # Its main function by name: the script beside this Python need not be in the PATH.
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
        command += [f"{target.url}/openapi.json", "-H", f"Authorization: Bearer {target.key}"]
        command += ["--phases", step.phases, "--max-examples", str(step.examples), "--seed", str(seed)]
        command += [*step.filters, "--exclude-checks", NOT_CHECKED, "--continue-on-failure", "--no-shrink"]
        command += ["--request-timeout", str(LONGEST_CALL_S), "--suppress-health-check", "all"]
        command += ["--generation-database", "none", "--warnings", "off", "--no-color"]
        command += ["--report", "json", "--report-json-path", str(report)]
        # In an empty folder, because Schemathesis writes notes to the folder in which it runs.
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=ROUND_WITHIN_S,
            check=False,
        )
        if not report.exists():
            raise SystemExit(f"Schemathesis gave no report:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(report.read_text())
        if found["failures"]:
            print(done.stdout.partition("= FAILURES =")[2][:4000])
        return found


def rounds(num_requests: int) -> Iterator[Round]:
    """Yield what to run, without end. With few requests there are few examples and no boundary values."""
    if num_requests >= 5000:
        without = ("--exclude-path", RESPONSES)
        yield Round("all but responses", FIRST_EXAMPLES, "examples,coverage,fuzzing,stateful", without)
        yield Round("responses", RESPONSES_EXAMPLES, filters=("--include-path", RESPONSES))
    while True:
        yield Round("random bodies", min(MORE_EXAMPLES, max(num_requests // 40, 2)))


def fuzz(target: Target, num_requests: int, seed: int) -> dict[str, Any]:
    """Everything against one server; returns the last line."""
    progress, tally, before = Progress(), Tally(), counted(target)
    progress.say(f"raw cases, to {target.url}")
    send_raw(target, tally)
    progress.say(f"{tally.num_raw} sent, {len(tally.failures)} answered wrongly")
    for number, step in enumerate(rounds(num_requests)):
        progress.say(f"{step.name} …")
        tally.add_report(run_round(target, step, seed + number))
        num = (counted(target) - before).total()
        progress.say(f"{num} requests, {len(tally.failures)} kinds of failures")
        if num >= num_requests:
            break
    seen = counted(target) - before
    for route in sorted({route for route, _ in seen}):
        statuses = {status: num for (where, status), num in sorted(seen.items()) if where == route}
        print(f"  {route:32s} {statuses}")
    for failure in sorted(tally.failures):
        print(f"  ! {failure}")
    num_5xx = sum(num for (_, status), num in seen.items() if status >= 500)
    return {
        "requests": seen.total(),
        "raw_cases": tally.num_raw,
        "server_errors": num_5xx + tally.num_unanswered,
        "undocumented_status": len(tally.undocumented),
        "failures": len(tally.failures),
        "seed": seed,
        "elapsed_s": round(progress.elapsed_s, 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer with these arguments of the command line; return the exit status."""
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="how many at least (10,000)")
    parser.add_argument("--seed", type=int, default=1, help="of the random bodies (1)")
    given = parser.parse_args(argv)
    with started() as target:
        result = fuzz(target, given.requests, given.seed)
    print(json.dumps(result))
    return 1 if result["server_errors"] or result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
