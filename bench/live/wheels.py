"""From two wheels to an answer, with every other package from a package index: does docs/install.md work?

    python -m bench.live.wheels [--keep FOLDER]

Both wheels are built. The commands for a CPU that docs/install.md has are run in an empty environment, and the client is installed into another
one. Then the server is started in an empty folder, and `overture chat` of the client's environment asks the demo model.

  build_s     both wheels
  server_s    pip installs the server, with torch and vLLM (from pip's cache, where it has them)
  client_s    pip installs the client
  ready_s     /readyz says 200, since the server was started
  answered    the demo model's answer to what my name is has the name

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.live.report import ROOT, Progress
from bench.live.serving import ServerProcess, without_our_modules
from bench.live.soak.server import free_port

INSTALL_TIMEOUT_S, CHAT_TIMEOUT_S = 1800.0, 60.0


def commands() -> list[list[str]]:
    """What docs/install.md says to do on a CPU, in order, as arguments of pip."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = text.split("On a CPU", 1)[1].split("With an NVIDIA GPU", 1)[0]
    return [shlex.split(line)[1:] for line in re.findall(r"^    (pip install .+)$", section, re.MULTILINE)]


def environment(folder: Path) -> Path:
    """An empty environment, made by the Python that .venv was made with; returns its folder of commands."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([str(python), "-m", "venv", str(folder)], check=True)
    return folder / "bin"


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


def install_server(folder: Path, wheels: Path) -> Path:
    """Run the page's commands in an empty environment; returns its `overture`."""
    found = environment(folder)
    for arguments in commands():
        if "--index-url" in arguments:
            # A mirror may have the build as well, and may be all that is reachable: requirements/install.sh asks it first, too.
            at = arguments.index("--index-url")
            with contextlib.suppress(RuntimeError):
                pip(found, arguments[:at] + arguments[at + 2 :], wheels)
                continue
        pip(found, arguments, wheels)
    return found / "overture"


def server_of(overture: Path, folder: Path) -> ServerProcess:
    """It is started in an empty folder."""
    empty, port = folder / "empty", free_port()
    empty.mkdir()
    command = [str(overture), "serve", "--port", str(port), "--data-dir", str(folder / "data")]
    return ServerProcess(command, port, folder / "serve.log", empty, without_our_modules())


def measure(folder: Path) -> dict[str, Any]:
    """Go the whole way in `folder`."""
    progress, found, marks = Progress(), dict[str, Any](), [time.monotonic()]

    def took(name: str) -> None:
        marks.append(time.monotonic())
        found[name] = round(marks[-1] - marks[-2], 1)
        progress.say(f"{name} {found[name]}")

    wheels = folder / "wheels"
    subprocess.run([sys.executable, str(ROOT / "requirements" / "wheels.py"), str(wheels)], check=True)
    took("build_s")
    overture = install_server(folder / "server", wheels)
    took("server_s")
    client = environment(folder / "client")
    pip(client, ["install", "overture-client"], wheels)
    took("client_s")
    with server_of(overture, folder) as server:
        server.wait(server.is_ready)
        took("ready_s")
        question = ["--url", server.url, "--temperature", "0", "My name is Ada. What is my name?"]
        command = [str(client / "overture"), "chat", *question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHAT_TIMEOUT_S)
    progress.say(f"answer: {(done.stdout or done.stderr).strip()}")
    return found | {"answered": done.returncode == 0 and "Ada" in done.stdout}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave everything there")
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(folder.resolve())
    print(json.dumps(found))
    sys.exit(not found["answered"])


if __name__ == "__main__":
    main()
