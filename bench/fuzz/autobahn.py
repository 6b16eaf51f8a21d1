"""The Autobahn suite's fuzzing client against our websocket: `python -m bench.fuzz.autobahn`.

What it sends comes back if all is well, so it needs an echo. The chat socket gives none: it takes no binary frames and no text but its own JSON.
So the cases run against a small application of our own websocket (`gateway.doors.chat.websocket`, the class of the chat socket, behind the
server's own connections) that echoes, with the chat socket's hard limit of 16 MiB for a frame.
The suite is of Python 2.7: it is installed beside .venv's
packages on the first run (requirements/autobahn.txt) and started as a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import WSMsgType, web
from prometheus_client import CollectorRegistry

from bench.live.shared.report import options
from gateway.access.auth import KeyRing
from gateway.doors.chat.socket import CLOSE_TIMEOUT_S, HARD_FRAME_BYTES
from gateway.doors.chat.websocket import StrictWebSocket
from gateway.doors.http.connections import Connections, Runner, max_open_files, watched
from gateway.metrics.metrics import Metrics
from gateway.settings.config import PROJECT_ROOT, Config

PINS = PROJECT_ROOT / "requirements" / "autobahn.txt"
SUITE = PROJECT_ROOT / ".venv" / "autobahn"
AGENT = "overture"
LIMIT_S = 900.0  # Chosen: the suite takes about a minute and a half on two cores.
# Compression, which we do not offer: a short frame could hold much, and answers are small.
REFUSED = ("12.*", "13.*")
# And 6.*, the longest of those without large frames, is left out.
QUICK = ("1.*", "2.*", "3.*", "4.*", "5.*", "7.*", "10.*")
RUN = "import site,sys;site.addsitedir(sys.argv.pop(1));from autobahntestsuite.wstest import run;run()"


class NoSuite(Exception):
    """The suite cannot be run here; the message says why."""


async def echo(request: web.Request) -> web.WebSocketResponse:
    """Send every message back."""
    socket = StrictWebSocket(
        limit_bytes=HARD_FRAME_BYTES, hard_limit_bytes=HARD_FRAME_BYTES, timeout=CLOSE_TIMEOUT_S
    )
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await socket.send_bytes(message.data)
    return socket


@asynccontextmanager
async def echo_server() -> AsyncIterator[str]:
    """An echo on a free port of this machine; gives its address."""
    connections = Connections(Config(), KeyRing(), Metrics(CollectorRegistry()), max_open_files())
    app = web.Application(middlewares=[watched(connections)])
    app.add_routes([web.get("/", echo)])
    runner = Runner(app, connections, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"ws://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def find_python(given: str | None) -> Path:
    """A Python 2.7. Raises NoSuite."""
    named = [given] if given else [shutil.which("python2.7")]
    found = [Path(name) for name in named if name]
    if not given:
        found += sorted(Path("~/.pyenv/versions").expanduser().glob("2.7*/bin/python2.7"))
    for path in found:
        # pyenv's stand-ins exist whether or not a version is chosen.
        try:
            probe = subprocess.run(
                [path, "-c", "import sys; sys.exit(sys.version_info[:2] != (2, 7))"],
                check=False,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            continue
        if probe.returncode == 0:
            return path
    raise NoSuite(
        "There is no Python 2.7 here: install one (pyenv install 2.7.18), or name it with --python."
    )


def is_installed() -> bool:
    """Return whether the suite is installed."""
    return (SUITE / "autobahntestsuite").is_dir()


def install(python: Path) -> None:
    """Install the suite as pinned, unless it is there. Raises NoSuite."""
    if is_installed():
        return
    SUITE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SUITE.parent) as folder:
        target = Path(folder) / "suite"
        flags = (
            "-q --disable-pip-version-check --no-input --no-deps --require-hashes --no-warn-script-location"
        )
        command = [python, "-m", "pip", "install", *flags.split(), "--target", target, "-r", PINS]
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise NoSuite(f"The suite could not be installed:\n{done.stdout[-2000:]}")
        target.rename(SUITE)


async def run_suite(python: Path, cases: tuple[str, ...], report: Path) -> dict[str, Any]:
    """Run the cases against an echo of ours. Returns the suite's index: by case its `behavior` and `behaviorClose`."""
    async with echo_server() as url:
        spec = {
            "outdir": str(report),
            "servers": [{"agent": AGENT, "url": url}],
            "cases": list(cases),
            "exclude-cases": [],
            "exclude-agent-cases": {},
        }
        path = report / "spec.json"
        path.write_text(json.dumps(spec))
        process = await asyncio.create_subprocess_exec(
            *(python, "-c", RUN, SUITE, "--mode", "fuzzingclient", "--spec", path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(report), "PYTHONUNBUFFERED": "1"},
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    index = report / "index.json"
    if not index.exists():
        raise NoSuite(f"The suite ended without a report:\n{said.decode(errors='replace')[-2000:]}")
    found: dict[str, Any] = json.loads(index.read_text())[AGENT]
    return found


def verdicts(index: dict[str, Any]) -> dict[str, str]:
    """Return one of OUTCOMES for each case, in the suite's order. A case passes if the server behaves well and closes well."""
    found = {}
    for case, entry in sorted(index.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        both = {entry["behavior"], entry["behaviorClose"]}
        if "UNIMPLEMENTED" in both and f"{case.split('.')[0]}.*" in REFUSED:
            found[case] = "refused_by_limits"
        elif not both <= {"OK", "NON-STRICT", "INFORMATIONAL"}:
            found[case] = "failed"
        elif "NON-STRICT" in both:
            found[case] = "non_strict"
        else:
            found[case] = "informational" if "INFORMATIONAL" in both else "ok"
    return found


OUTCOMES = "ok", "non_strict", "informational", "refused_by_limits", "failed"


def main() -> int:
    """Run the suite from the command line; return the exit status."""
    parser = options(__doc__, quick="the cases that take seconds")
    parser.add_argument("--cases", default="*", help="cases, such as 1.*,7.1.* (default: all)")
    parser.add_argument("--python", help="a Python 2.7 (default: python2.7, or pyenv's)")
    parser.add_argument("--report", type=Path, help="folder to keep the suite's own report in")
    args = parser.parse_args()
    cases = QUICK if args.quick else tuple(args.cases.split(","))
    with tempfile.TemporaryDirectory() as folder:
        report = args.report or Path(folder)
        report.mkdir(parents=True, exist_ok=True)
        try:
            python = find_python(args.python)
            if not is_installed():
                print("installing the Autobahn suite", flush=True)
            install(python)
            index = uvloop.run(run_suite(python, cases, report))
        except NoSuite as error:
            print(error, file=sys.stderr)
            return 2
    found = verdicts(index)
    for case, outcome in found.items():
        if outcome in ("failed", "non_strict", "informational"):
            print(f"{case}: {outcome}")
    counts = Counter(found.values())
    print(json.dumps({"cases": len(found)} | {name: counts[name] for name in OUTCOMES}))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
