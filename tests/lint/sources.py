"""Our sources as syntax trees, each of which is made once for all rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """The nodes of a file's tree, those above before those below."""
    return tuple(ast.walk(ast.parse(text)))


@cache
def nodes_by_path(*folders: str) -> dict[str, tuple[ast.AST, ...]]:
    """Those of all files below these folders, by the path from the root."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): nodes_of(path.read_text("utf-8")) for path in paths}
