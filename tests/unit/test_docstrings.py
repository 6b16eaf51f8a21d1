"""Each public function says what it does, itself or where its name is declared."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "engine_bridge", "kvtiers", "overture_client")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def _is_documented_by_others(owner: ast.ClassDef, ours: set[str]) -> bool:
    """Whether a class extends one that is not ours, such as `asyncio.Protocol` or vLLM's, whose methods it overrides."""
    bases = {ast.unparse(base).split("[")[0] for base in owner.bases}
    return bool(bases - ours - {"Protocol", "Exception"})


def _public(tree: ast.Module, ours: set[str]) -> Iterator[Function]:
    owners: list[ast.Module | ast.ClassDef] = [
        tree,
        *(
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and not node.name.startswith("_")
            and not _is_documented_by_others(node, ours)
        ),
    ]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                yield node


def test_each_public_function_is_documented_where_it_is_or_where_it_is_declared() -> None:
    trees = list(_trees())
    nodes = [node for _, tree in trees for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    documented = {node.name for node in nodes if isinstance(node, Function) and ast.get_docstring(node)}
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees
        for node in _public(tree, ours)
        if node.name not in documented
    ]
    assert not silent
    assert len(documented) > 1000
