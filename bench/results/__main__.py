"""Evidence: keep runs, and make bench/RESULTS.md and docs/plots of them.

python -m bench.results keep NAME -- COMMAND...   run a bench and keep its last line as bench/results/NAME.json
python -m bench.results sim                       keep every table of `python -m bench.sim` and `bench.emulated`, then write
python -m bench.results write                     make the top of bench/RESULTS.md, and docs/plots
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

PARTS_OF_SYMPHONY = ("--part", "paper", "--part", "chat8b", "--part", "agents", "--part", "missing")
# What `sim` runs (aim: 40 minutes on two cores): by the name that a run is kept under, which begins with the package's, the table and its arguments.
SIMULATED: dict[str, tuple[str, ...]] = {
    "emulated-chameleon": ("chameleon", "--part", "main", "--part", "eviction", "--part", "forecast"),
    "emulated-chameleon-sched": ("chameleon", "--part", "sched", "--seeds", "2"),
    "emulated-caraserve": (
        "caraserve",
        "--part",
        "cold",
        "--part",
        "production",
        "--part",
        "lengths",
        "--seeds",
        "2",
    ),
    "sim-caraserve": ("caraserve", "--part", "router", "--part", "mixed", "--seeds", "2"),
    "emulated-symphony": ("symphony", "--part", "users", "--part", "missing", "--seeds", "2"),
    "sim-symphony": ("symphony", *PARTS_OF_SYMPHONY, "--seeds", "2"),
    "sim-symphony-limits": ("symphony", "--part", "limits", "--seeds", "2"),
    "sim-symphony-scale": ("symphony", "--part", "scale"),
    "emulated-adaptivellm": ("adaptivellm", "--part", "main", "--part", "turnaround"),
    "emulated-adaptivellm-limits": ("adaptivellm", "--part", "limits"),
    "emulated-adaptivellm-predictors": ("adaptivellm", "--part", "predictors"),
    "emulated-order": ("order", "--quick"),
    "emulated-scarce": ("scarce",),
    "emulated-urgent": ("urgent",),
}

# While one table imports vLLM, or waits for the last of its runs, the other has the cores; in virtual time neither sees that (but for the
# events a second that `symphony --part scale` says it has played). Chosen.
RUNS_AT_ONCE = 2


def made(root: Path = ROOT, folder: Path = FOLDER) -> dict[Path, str]:
    """The files and their text as the kept runs say. Raises RunError."""
    runs = load(folder)
    results = root / "bench/RESULTS.md"
    texts = plots(runs) | {"orders.svg": frontier(runs.get("emulated-order"))}
    drawn = {root / "docs/plots" / name: text for name, text in texts.items()}
    return {results: page(results.read_text(), runs)} | drawn


def write(root: Path = ROOT, folder: Path = FOLDER) -> None:
    for path, text in made(root, folder).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def stale(root: Path = ROOT, folder: Path = FOLDER) -> list[str]:
    """The files that `write` would change."""
    files = made(root, folder).items()
    return [
        str(path.relative_to(root)) for path, text in files if not path.exists() or path.read_text() != text
    ]


def check(root: Path = ROOT, folder: Path = FOLDER) -> None:
    if files := stale(root, folder):
        raise RunError(f"stale: {', '.join(files)}; run `python -m bench.results write`")


def command_of(name: str) -> list[str]:
    """What a run of `SIMULATED` is made by."""
    return ["python", "-m", f"bench.{name.split('-')[0]}", *SIMULATED[name]]


def simulate() -> None:
    """Keep each run of `SIMULATED`, go on when one fails, and write what there is. Raises RunError in the end if one failed."""

    def is_kept(number: int, name: str) -> bool:
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
