"""bench/RESULTS.md: claims with the papers' figures and ours, what falls short first; then where mechanisms stop paying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.results import limits
from bench.results.claims import CLAIMS, GROUPS, MECHANISMS, PAPERS, WITHOUT_NUMBER, Claim
from bench.results.lookup import Found, Row, rows_of, shown
from bench.results.runs import Run

NOT_MEASURED = "not measured"
INTRODUCTION = """# Results

A row for each mechanism that is measured and each headline of the papers: the paper's figure; ours in virtual time, by the live engine's policy
objects (median over seeds, least … most); ours live, on a real vLLM engine. **Bold** falls short of the aim, which is the paper's figure unless
another is named. A bound is the figure of a system that knows the future, on the same requests: a yardstick that proves nothing, and that ours
passes in places. The papers' figures and those in virtual time are of GPUs, the live ones of CPU cores unless a GPU is named: compare changes and
ratios, not times. Each figure links to its run, a file with the command, the commit, the date and the machine. `python -m bench.results write`
makes this page and the [plots](../docs/plots) from these files; [LOG.md](LOG.md) has what was tried and did not pay."""
LIMITS = """In virtual time, one thing changed at a time. **Bold** does not pay: less than 5% of TTFT saved, latency lost, or no more throughput.
Leave a mechanism off where it does not pay."""
SHORT, UNDECIDED, NOT_HELD, REACHED = (
    "What falls short",
    "What is undecided: the interval of 95% spans the aim",
    "What is not measured",
    "What reaches its aim",
)
VERBS = {
    SHORT: "fall short",
    UNDECIDED: "are undecided",
    NOT_HELD: "are not measured",
    REACHED: "reach their aim",
}


def section_of(row: Row) -> str:
    """Return the heading under which a claim stands."""
    if row.falls_short:
        return SHORT
    if row.is_undecided:
        return UNDECIDED
    return REACHED if row.is_measured else NOT_HELD


def page(runs: Mapping[str, Run], claims: Sequence[Claim] = CLAIMS) -> str:
    """Return the text of the page."""
    rows = rows_of(claims, runs)
    sections = {name: [row for row in rows if section_of(row) == name] for name in VERBS}
    counts = ", ".join(f"{len(found)} {VERBS[name]}" for name, found in sections.items())
    blocks = [INTRODUCTION, f"Of {len(rows)} claims {counts}."]
    blocks += [f"## {name}\n{_table(found)}" for name, found in sections.items() if found]
    if swept := list(limits.rows(runs)):
        blocks.append(f"## Where it stops paying\n{LIMITS}\n\n{_lines(limits.HEAD, swept)}")
    blocks.append("Papers: " + "; ".join(f"{name}, *{title}*" for name, title in PAPERS.items()) + ".")
    blocks.append("Mechanisms: " + "; ".join(f"{id} {name}" for id, name in MECHANISMS.items()) + ".")
    linked = (f"[{id}](../{path})" for id, path in WITHOUT_NUMBER.items())
    blocks.append(f"Mechanisms without a number, and the test or the decision of each: {', '.join(linked)}.")
    return "\n\n".join(blocks) + "\n"


CLAIM_HEAD = ("claim", "paper", "ours, in virtual time", "ours, live", "aim")


def _table(rows: Iterable[Row]) -> str:
    ordered = sorted(rows, key=lambda row: GROUPS.index(row.claim.group))
    return _lines(CLAIM_HEAD, map(_claim, ordered))


def _claim(row: Row) -> tuple[str, ...]:
    """Return the cells of a claim. Its note says why it falls short, so it stands only where that is a question."""
    claim = row.claim
    explains = claim.note and section_of(row) in (SHORT, UNDECIDED)
    what = f"{claim.id} {claim.what}" + (f" ({claim.note})" if explains else "")
    sim, live = _cell(row, claim.sim, row.sim), _cell(row, claim.live, row.live)
    if row.bound is not None:
        sim += f", bound {shown(row.bound.value, claim.unit)}"
    if claim.live_what and row.live:
        live += f", {claim.live_what}"
    return what, _paper(claim), sim, live, _aim(row)


def _paper(claim: Claim) -> str:
    if claim.paper is None:
        return "–"
    ends = " to ".join(shown(end, claim.unit) for end in claim.paper_ends)
    return f"{ends}, {claim.group} {claim.source}"


def _cell(row: Row, place: str, found: Found | None) -> str:
    if found is None:
        return NOT_MEASURED if place else "–"
    text = f"[{shown(found.value, row.claim.unit)}](results/{found.run.name}.json)"
    text = f"**{text}**" if row.is_short(found) else text
    if found.spread is None:
        return text
    least, most = (shown(end, row.claim.unit) for end in found.spread)
    return f"{text} ({least} … {most})"


def _aim(row: Row) -> str:
    if row.aim is None:
        return NOT_MEASURED if row.claim.goal else "–"
    if row.claim.unit == "yes":
        return shown(row.aim, "yes")
    return f"{'≤' if row.claim.better == 'lower' else '≥'} {shown(row.aim, row.claim.unit)}"


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)
