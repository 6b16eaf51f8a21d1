"""From a fresh clone to the first token in a browser, or from two wheels to an answer.

    python -m bench.live.first_contact [--from clone | wheels]

`clone`: the last commit is cloned into an empty folder and served there by `make serve`, as the README says. Then headless Chromium opens the page
and sends a question. Needs Chromium and the packages of `make test`. Times are seconds since `git clone` began.

  setup_s            the packages are installed and the server's process begins
  ready_s            /readyz says 200
  first_token_s      the first text of the answer stands in the page
  enter_to_token_ms  the same since Enter was pressed

`wheels`: both wheels are built, and the commands for a CPU that docs/install.md has are run in an empty environment, with every other package from a
package index; the client is installed into another one. Then the server is started in an empty folder, and `overture chat` of the client's
environment asks the demo model. Times are seconds since both wheels were begun.

  build_s            both wheels are there
  server_s           pip has installed the server, with torch and vLLM
  client_s           pip has installed the client
  ready_s            /readyz says 200
  answered           the demo model's answer to what my name is has the name

pip may use its own cache, as it does for anyone who has installed something before. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.live.shared.report import ROOT, Progress, figures, options, report
from bench.live.shared.serving import ServerProcess, free_port, without_our_modules

AIMS = {"ready_s": "aim ≤ 200", "answered": "aim true"}
SETUP_TIMEOUT_S, INSTALL_TIMEOUT_S, CHAT_TIMEOUT_S = 1200.0, 1800.0, 60.0
CHROMIUM_ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class Way(Progress):
    """One way to the server, in a folder. found: the figures so far."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.found: dict[str, Any] = {}

    def reached(self, name: str) -> None:
        """Note the seconds until now under this name."""
        self.found[name] = round(self.elapsed_s, 1)
        self.say(name)

    def environment(self, name: str) -> Path:
        """Make an empty environment by the Python that .venv was made with; return its folder of commands."""
        python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        subprocess.run([str(python), "-m", "venv", str(self.folder / name)], check=True)
        return self.folder / name / "bin"

    def server(self, folder: Path, *command: str, port: int, **variables: str) -> ServerProcess:
        """Start a server by this command in a folder, without the modules of this checkout."""
        environ = without_our_modules() | variables
        return ServerProcess(command, port, self.folder / "serve.log", folder, environ)


# -- from a clone ------------------------------------------------------------------------------------------------------


def from_clone(way: Way) -> None:
    """Clone, serve, ask in the page."""
    clone, port = way.folder / "overture", free_port()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    way.say("cloned; make serve installs what it needs")
    data = str(way.folder / "data")
    with way.server(clone, "make", "serve", f"PORT={port}", port=port, XDG_DATA_HOME=data) as server:
        server.wait(lambda: server.status_of("/healthz") is not None, SETUP_TIMEOUT_S)
        way.reached("setup_s")
        server.wait(server.is_ready)
        way.reached("ready_s")
        waited_s = first_token(server.url)
        way.reached("first_token_s")
        way.found["enter_to_token_ms"] = round(waited_s * 1e3)


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


# -- from the wheels ---------------------------------------------------------------------------------------------------


def from_wheels(way: Way) -> None:
    """Build, install, serve, ask by the client."""
    wheels, empty, port = way.folder / "wheels", way.folder / "empty", free_port()
    subprocess.run([sys.executable, str(ROOT / "requirements" / "wheels.py"), str(wheels)], check=True)
    way.reached("build_s")
    overture = install_server(way.environment("server"), wheels)
    way.reached("server_s")
    client = way.environment("client")
    pip(client, ["install", "overture-client"], wheels)
    way.reached("client_s")
    empty.mkdir()
    command = [str(overture), "serve", "--port", str(port), "--data-dir", str(way.folder / "data")]
    with way.server(empty, *command, port=port) as server:
        server.wait(server.is_ready)
        way.reached("ready_s")
        question = ["--url", server.url, "--temperature", "0", "My name is Ada. What is my name?"]
        command = [str(client / "overture"), "chat", *question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHAT_TIMEOUT_S)
    way.say(f"answer: {(done.stdout or done.stderr).strip()}")
    way.found["answered"] = done.returncode == 0 and "Ada" in done.stdout


def install_server(commands_of: Path, wheels: Path) -> Path:
    """Run the commands for a CPU that docs/install.md has in an empty environment; return its `overture`."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = text.split("On a CPU", 1)[1].split("With an NVIDIA GPU", 1)[0]
    for line in re.findall(r"^    pip (install .+)$", section, re.MULTILINE):
        arguments = shlex.split(line)
        if "--index-url" in arguments:
            # A mirror may have the build as well, and may be all that is reachable: requirements/install.sh asks it first, too.
            at = arguments.index("--index-url")
            with contextlib.suppress(RuntimeError):
                pip(commands_of, arguments[:at] + arguments[at + 2 :], wheels)
                continue
        pip(commands_of, arguments, wheels)
    return commands_of / "overture"


def pip(commands_of: Path, arguments: list[str], wheels: Path) -> None:
    """Run pip, with our own wheels at hand. Raises RuntimeError with its last lines where it fails."""
    flags = ["--quiet", "--no-input", "--disable-pip-version-check", "--find-links", str(wheels)]
    done = subprocess.run(
        [str(commands_of / "pip"), *arguments, *flags],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"pip {shlex.join(arguments)} failed:\n{done.stderr[-1500:]}")


WAYS = {"clone": from_clone, "wheels": from_wheels}


def main() -> None:
    """Run the bench from the command line; exit with 1 if an answer was wrong."""
    parser = options(__doc__)
    parser.add_argument(
        "--from", dest="way", choices=WAYS, default="clone", help="where the server comes from"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ov-") as temporary:
        way = Way(Path(temporary).resolve())
        WAYS[args.way](way)
    title = f"From {args.way} to the first answer"
    report(title, figures(way.found, AIMS), {"bench": "first_contact", "from": args.way} | way.found)
    sys.exit(not way.found.get("answered", True))


if __name__ == "__main__":
    main()
