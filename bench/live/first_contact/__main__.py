"""From a fresh clone to the first token in a browser, and to the first tool call of an agent.

    python -m bench.live.first_contact [--keep FOLDER]

The last commit is cloned into an empty folder and served there by `make serve`, as the README says. Then headless Chromium opens the page
and sends a question, and an agent of the OpenAI Agents SDK calls a tool. Times are seconds since `git clone` began.

  setup_s            the packages are installed and the server's process begins
  ready_s            /readyz says 200
  first_token_s      the first text of the answer stands in the page
  enter_to_token_ms  the same since Enter was pressed
  tool_call          the agent's tool was called with the argument that it asks for

Needs Chromium and the packages of `make test`. pip may use its own cache, as it does for anyone who has installed something before. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.live.report import ROOT, Progress, figures, last_line, options, report
from bench.live.serving import ServerProcess, without_our_modules
from bench.live.soak.server import free_port

AIMS = {"ready_s": "aim ≤ 200", "tool_call": "aim true"}
SETUP_TIMEOUT_S = 1200.0
AGENTS_SDK = "openai-agents==0.24.0"
CHROMIUM_ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def fresh_server(folder: Path, progress: Progress) -> ServerProcess:
    """`make serve` in a fresh clone. folder: where the clone and the server's data go."""
    clone, port = folder / "overture", free_port()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    progress.say("cloned; make serve installs what it needs")
    environ = without_our_modules() | {"XDG_DATA_HOME": str(folder / "data")}
    return ServerProcess(["make", "serve", f"PORT={port}"], port, folder / "serve.log", clone, environ)


def first_token(url: str) -> float:
    """Open the page, ask, and wait for the answer's first text. Returns the seconds since Enter."""
    from playwright.sync_api import expect, sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS)
        page = browser.new_page()
        page.goto(url)
        question = page.get_by_role("textbox", name="Message", exact=True)
        question.fill("Hello! My name is Ada.")
        pressed_s = time.perf_counter()
        question.press("Enter")
        expect(page.locator("article.turn .answer").first).not_to_be_empty(timeout=60_000)
        took_s = time.perf_counter() - pressed_s
        browser.close()
    return took_s


def tool_call(url: str, folder: Path, progress: Progress) -> bool:
    """Whether an agent's tool was called as it should be, in an environment that has the Agents SDK and nothing of ours."""
    environment = folder / "agent"
    subprocess.run([shutil.which("python3") or "python3", "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", AGENTS_SDK], check=True)
    progress.say("the agent's environment is there")
    script = Path(__file__).with_name("agent.py")
    found = last_line(python, str(script), f"{url}/v1", timeout_s=180)
    return bool(found["tool_call"])


def measure(folder: Path) -> dict[str, Any]:
    progress, found = Progress(), dict[str, Any]()
    with fresh_server(folder, progress) as server:
        server.wait(lambda: server.status_of("/healthz") is not None, SETUP_TIMEOUT_S)
        found["setup_s"] = round(progress.elapsed_s, 1)
        progress.say("installed; the engine starts")
        server.wait(server.is_ready)
        found["ready_s"] = round(progress.elapsed_s, 1)
        progress.say("ready")
        waited_s = first_token(server.url)
        found["first_token_s"] = round(progress.elapsed_s, 1)
        found["enter_to_token_ms"] = round(waited_s * 1e3)
        progress.say("the page has shown the first token")
        found["tool_call"] = tool_call(server.url, folder, progress)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="clone into this folder and leave it")
    args: argparse.Namespace = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True)
        found = measure(args.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="ov-") as folder:
            found = measure(Path(folder))
    rows = figures(found, AIMS)
    report("From a fresh clone to the first answer", rows, {"bench": "first_contact"} | found)


if __name__ == "__main__":
    main()
