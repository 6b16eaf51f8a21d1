"""From two wheels to an answer.

    python -m bench.live.first_contact

Both wheels are built, and the commands for a CPU that docs/install.md has are run in an empty environment, with every other package from a package
index; the client is installed into another one. Then the server is started in an empty folder, and `overture chat` of the client's environment asks
the demo model. Times are seconds since both wheels were begun.

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
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.live.shared.report import ROOT, Progress, figures, options, report
from bench.live.shared.serving import ServerProcess, free_port, without_our_modules

AIMS = {"ready_s": "aim ≤ 200", "answered": "aim true"}
INSTALL_TIMEOUT_S, CHAT_TIMEOUT_S = 1800.0, 60.0


def measure(folder: Path) -> dict[str, Any]:
    """Build, install, serve and ask by the client, all in this folder; return the figures."""
    progress, found = Progress(), dict[str, Any]()

    def reached(name: str) -> None:
        """Note the seconds until now under this name."""
        found[name] = round(progress.elapsed_s, 1)
        progress.say(name)

    wheels, empty, port = folder / "wheels", folder / "empty", free_port()
    subprocess.run([sys.executable, str(ROOT / "requirements" / "wheels.py"), str(wheels)], check=True)
    reached("build_s")
    overture = install_server(environment(folder / "server"), wheels)
    reached("server_s")
    client = environment(folder / "client")
    pip(client, ["install", "overture-client"], wheels)
    reached("client_s")
    empty.mkdir()
    command = [str(overture), "serve", "--port", str(port), "--data-dir", str(folder / "data")]
    with ServerProcess(command, port, folder / "serve.log", empty, without_our_modules()) as server:
        server.wait(server.is_ready)
        reached("ready_s")
        question = ["--url", server.url, "--temperature", "0", "My name is Ada. What is my name?"]
        command = [str(client / "overture"), "chat", *question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHAT_TIMEOUT_S)
    progress.say(f"answer: {(done.stdout or done.stderr).strip()}")
    found["answered"] = done.returncode == 0 and "Ada" in done.stdout
    return found


def environment(folder: Path) -> Path:
    """Make an empty environment by the Python that .venv was made with; return its folder of commands."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([str(python), "-m", "venv", str(folder)], check=True)
    return folder / "bin"


def install_server(commands_of: Path, wheels: Path) -> Path:
    """Run the commands for a CPU that docs/install.md has in an empty environment; return its `overture`."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    section = text.split("On a CPU", 1)[1].split("With an NVIDIA GPU", 1)[0]
    for line in re.findall(r"^pip (install .+)$", section, re.MULTILINE):
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


def main() -> None:
    """Run the bench from the command line; exit with 1 if the answer was wrong."""
    options(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="ov-") as temporary:
        found = measure(Path(temporary).resolve())
    report("From two wheels to the first answer", figures(found, AIMS), {"bench": "first_contact"} | found)
    sys.exit(not found["answered"])


if __name__ == "__main__":
    main()
