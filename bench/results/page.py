"""The top part of bench/RESULTS.md: claims with the papers' figures and ours, what falls short first; then the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.results import limits
from bench.results.claim import LOWER, YES, Claim, Figure
from bench.results.claims import CLAIMS, GROUPS, MECHANISMS, PAPERS
from bench.results.lookup import Found, Row, rows_of, shown
from bench.results.runs import Run, RunError

MARKER = (
    "<!-- All above is written by `python -m bench.results write`. Below: notes on measurements, by hand. -->"
)
NOT_MEASURED = "not measured"
INTRODUCTION = """# Results

Each claim of the papers and of our own: the paper's figure; ours in virtual time, by the live engine's policy objects (median over
seeds, least … most); ours live, on a real vLLM engine. **Bold** falls short of the aim, which is the paper's figure unless another is named.
"not measured": no kept run has the figure; "–": there is none. "Bound" is what one that knows the future reaches on the same requests in virtual
time: lengths of answers, every next use, no cost of moving what is needed, and of times all but their noise. It is a yardstick and proves
nothing: it follows a few orders and routes, and ours does better in places. The papers' figures and the simulated ones are of GPUs, the live
ones of CPU cores unless a GPU is named: changes and ratios can be compared, times cannot.

`python -m bench.results write` makes this part and the plots in [docs/plots](../docs/plots) from the files in [bench/results](results);
[operations.md](../docs/operations.md#evidence) says how a run is kept."""
LIMITS = """In virtual time, one thing changed at a time. **Bold** does not pay: less than 5% of TTFT saved, latency lost, or no more throughput.
A mechanism that does not pay where you run it is better left off."""
SHORT, BOUNDED, UNDECIDED, NOT_HELD, REACHED = (
    "What falls short",
    "What falls short where one that knows the future does, too",
    "What is undecided: the interval of 95% spans the aim",
    "What is not measured",
    "What reaches its aim",
)
VERBS = {
    SHORT: "fall short",
    BOUNDED: "fall short where even one that knows the future does, with at least nine tenths of what that gains or a ninth more of what it bears",
    UNDECIDED: "are undecided",
    NOT_HELD: "are not measured",
    REACHED: "reach their aim",
}


def section_of(row: Row) -> str:
    """Under which heading a claim stands."""
    if row.falls_short:
        return BOUNDED if row.is_near_bound else SHORT
    if row.is_undecided:
        return UNDECIDED
    return REACHED if row.is_measured else NOT_HELD


def page(text: str, runs: Mapping[str, Run], claims: Sequence[Claim] = CLAIMS) -> str:
    """`text` with all above the marker made anew. Raises RunError if there is no marker, since what is by hand must not be lost."""
    _, marker, by_hand = text.partition(MARKER)
    if not marker:
        raise RunError(f"bench/RESULTS.md lacks the line {MARKER!r}")
    return f"{top(rows_of(claims, runs), runs)}\n{MARKER}{by_hand}"


def top(rows: Sequence[Row], runs: Mapping[str, Run]) -> str:
    sections = {name: [row for row in rows if section_of(row) == name] for name in VERBS}
    counts = ", ".join(f"{len(found)} {VERBS[name]}" for name, found in sections.items())
    blocks = [INTRODUCTION, f"Of {len(rows)} claims {counts}."]
    blocks += [f"## {name}\n" + (_table(found) if found else "Nothing.") for name, found in sections.items()]
    if swept := list(limits.rows(runs)):
        blocks.append(f"## Where it stops paying\n{LIMITS}\n\n{_lines(limits.HEAD, swept)}")
    blocks.append("## Runs\n" + _lines(RUN_HEAD, map(_run, runs.values())))
    blocks.append("Papers: " + "; ".join(f"{name}, *{title}*" for name, title in PAPERS.items()) + ".")
    blocks.append("Mechanisms: " + "; ".join(f"{id} {name}" for id, name in MECHANISMS.items()) + ".")
    return "\n\n".join(blocks) + "\n"


# -- claims ------------------------------------------------------------------------------------------------------------

CLAIM_HEAD = ("claim", "paper", "ours, simulated", "ours, live", "aim", "bound", "run, commit")


def _table(rows: Iterable[Row]) -> str:
    ordered = sorted(rows, key=lambda row: GROUPS.index(row.claim.group))
    return _lines(CLAIM_HEAD, map(_claim, ordered))


def _claim(row: Row) -> tuple[str, ...]:
    claim = row.claim
    what = f"{claim.id} {claim.what}".strip() + (f" ({claim.note})" if claim.note else "")
    runs = "; ".join(f"{_link(run)} {run.commit}" for run in row.runs)
    live = _cell(row, claim.live, row.live)
    if claim.live_what and row.live:
        live += f", {claim.live_what}"
    return what, _paper(claim), _cell(row, claim.sim, row.sim), live, _aim(row), _bound(row), runs or "–"


def _paper(claim: Claim) -> str:
    if claim.paper is None:
        return "–"
    ends = " to ".join(shown(end, claim.unit) for end in claim.paper_ends)
    return f"{ends}, {claim.group} {claim.source}"


def _cell(row: Row, figure: Figure | None, found: Found | None) -> str:
    if found is None:
        return NOT_MEASURED if figure else "–"
    text = shown(found.value, row.claim.unit)
    text = f"**{text}**" if row.is_short(found) else text
    if found.spread is None:
        return text
    least, most = (shown(end, row.claim.unit) for end in found.spread)
    return f"{text} ({least} … {most})"


def _aim(row: Row) -> str:
    if row.aim is None:
        return NOT_MEASURED if row.claim.goal else "–"
    if row.claim.unit == YES:
        return shown(row.aim, YES)
    return f"{'≤' if row.claim.better == LOWER else '≥'} {shown(row.aim, row.claim.unit)}"


def _bound(row: Row) -> str:
    if row.bound is None:
        return NOT_MEASURED if row.claim.bound else "–"
    return shown(row.bound.value, row.claim.unit)


# -- runs --------------------------------------------------------------------------------------------------------------

RUN_HEAD = ("run", "command", "commit", "date, UTC", "machine", "took", "notes")


def _run(run: Run) -> tuple[str, ...]:
    notes = " ".join(filter(None, (run.source and f"{run.source[0].upper()}{run.source[1:]}.", run.note)))
    return _link(run), f"`{run.command}`", run.commit, run.date, _machine(run), _took(run.wall_s), notes


def _link(run: Run) -> str:
    return f"[{run.name}](results/{run.name}.json)"


def _took(wall_s: float | None) -> str:
    if wall_s is None:
        return "not recorded"
    return f"{wall_s:.0f} s" if wall_s < 90 else f"{wall_s / 60:.0f} min"


def _machine(run: Run) -> str:
    cores = run.machine.get("cores")
    load = run.machine.get("load_1m")
    text = f"{run.machine.get('cpu', 'not recorded')}" + (f", {cores} cores" if cores else "")
    return text + (f", load {load}" if load is not None else "")


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)
