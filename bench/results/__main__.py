"""Evidence: keep runs, and make bench/RESULTS.md and docs/plots of them.

python -m bench.results keep NAME -- COMMAND...   run a bench and keep its last line as bench/results/NAME.json
python -m bench.results sim                       keep the benches of `python -m bench.emulated`, then write
python -m bench.results write                     make bench/RESULTS.md and docs/plots
python -m bench.results check                     exit status 1 if they are not what `write` would make
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.results.frontier import frontier
from bench.results.page import page
from bench.results.plots import plots
from bench.results.runs import FOLDER, ROOT, RunError, keep, load

# What `sim` runs (aim: 40 minutes on two cores): by the name that a run is kept under, which begins with the package's, the table and its arguments.
SIMULATED: dict[str, tuple[str, ...]] = {
    "emulated-chameleon": ("chameleon",),
    "emulated-caraserve": ("caraserve", "--seeds", "2"),
    "emulated-routing": ("routing",),
    "emulated-symphony": ("symphony", "--seeds", "2"),
    "emulated-adaptivellm": ("adaptivellm", "--part", "main", "--part", "turnaround"),
    "emulated-adaptivellm-limits": ("adaptivellm", "--part", "limits"),
    "emulated-adaptivellm-predictors": ("adaptivellm", "--part", "predictors"),
    "emulated-order": ("order",),
    "emulated-scarce": ("scarce",),
    "emulated-urgent": ("urgent",),
    "emulated-agents": ("agents", "--quick"),
    "emulated-adaptercache": ("adapter_cache",),
    "emulated-followers": ("followers",),
    "emulated-hosttier": ("host_tier",),
}

# While one table imports vLLM, or waits for the last of its runs, the other has the cores; in virtual time neither sees that. Chosen.
RUNS_AT_ONCE = 2


def made(root: Path = ROOT, folder: Path = FOLDER) -> dict[Path, str]:
    """Return the files and their text as the kept runs say. Raises RunError."""
    runs = load(folder)
    texts = plots(runs) | {"orders.svg": frontier(runs.get("emulated-order"))}
    drawn = {root / "docs/plots" / name: text for name, text in texts.items()}
    return {root / "bench/RESULTS.md": page(runs)} | drawn


def write(root: Path = ROOT, folder: Path = FOLDER) -> None:
    """Write all files that are made of kept runs."""
    for path, text in made(root, folder).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def check(root: Path = ROOT, folder: Path = FOLDER) -> None:
    """Raise RunError if a file is not what `write` would make."""
    files = made(root, folder).items()
    stale = [path for path, text in files if not path.exists() or path.read_text() != text]
    if stale:
        names = ", ".join(str(path.relative_to(root)) for path in stale)
        raise RunError(f"stale: {names}; run `python -m bench.results write`")


def command_of(name: str) -> list[str]:
    """Return the command that makes a run of `SIMULATED`."""
    return ["python", "-m", f"bench.{name.split('-')[0]}", *SIMULATED[name]]


def simulate() -> None:
    """Keep each run of `SIMULATED`, continue when one fails, and write the page. Raises RunError in the end if any failed."""

    def is_kept(number: int, name: str) -> bool:
        """Run and keep a table; return whether that worked."""
        began = time.perf_counter()
        print(f"{number} of {len(SIMULATED)}: {name}", file=sys.stderr, flush=True)
        try:
            keep(name, command_of(name))
        except RunError as error:
            print(error, file=sys.stderr)
            return False
        finally:
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return True

    with ThreadPoolExecutor(RUNS_AT_ONCE) as threads:
        kept = dict(zip(SIMULATED, threads.map(is_kept, itertools.count(1), SIMULATED), strict=True))
    write()
    if failed := [name for name, is_there in kept.items() if not is_there]:
        raise RunError(f"not kept: {', '.join(failed)}")


def main(arguments: Sequence[str]) -> None:
    """Do what the arguments say, or print how to call. Raises SystemExit, RunError."""
    match list(arguments):
        case ["keep", name, "--", _, *_]:
            keep(name, arguments[3:])
        case ["sim"]:
            simulate()
        case ["write"]:
            write()
        case ["check"]:
            check()
        case _:
            print(__doc__)
            raise SystemExit(list(arguments) not in ([], ["-h"], ["--help"]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RunError as error:
        raise SystemExit(str(error)) from None
