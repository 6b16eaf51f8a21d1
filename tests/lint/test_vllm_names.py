"""That our code and the inventory of vLLM's names say the same, as far as the source of our code tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_bridge.driver import vllm_api
from engine_bridge.driver.vllm_api.features import BENCHES
from engine_bridge.driver.vllm_api.inventory import ALL
from tests.vllm_versions import checksums, written

ROOT = Path(__file__).parents[2]
API = "engine_bridge.driver.vllm_api"
SERVING = [
    path for name in ("engine_bridge", "gateway", "kvtiers") for path in sorted((ROOT / name).rglob("*.py"))
]
ELSEWHERE = [path for path in SERVING if "vllm_api" not in path.parts]
# Private names of neither ours nor vLLM's: of torch, transformers, llvmlite and Python.
OTHERS = {"_C", "_exit", "_fntab", "_is_amx_tile_supported", "_commit_hash", "_make", "_replace"}

Place = tuple[str, int]


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


@pytest.fixture(scope="module")
def elsewhere() -> list[tuple[str, ast.Module]]:
    """All files but those of the inventory and its check."""
    return list(trees(ELSEWHERE))


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports, also by `importlib`."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
            return [module]
    return []


def test_nothing_but_the_inventory_s_package_imports_vllm(elsewhere: list[tuple[str, ast.Module]]) -> None:
    found = [
        (path, node.lineno)  # type: ignore[attr-defined]
        for path, tree in elsewhere
        for node in ast.walk(tree)
        for module in imported(node)
        if module.split(".")[0] == "vllm"
    ]
    assert found == []


def test_every_name_that_is_asked_of_it_is_one_that_it_has(elsewhere: list[tuple[str, ast.Module]]) -> None:
    asked = {
        alias.name
        for _, tree in elsewhere
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == API
        for alias in node.names
    }
    own = {"start", "vllm_version"}
    assert asked - own - vllm_api._places().keys() == set()
    assert len(asked) > 50


def test_every_private_name_that_is_used_of_others_is_ours_or_in_the_inventory(
    elsewhere: list[tuple[str, ast.Module]],
) -> None:
    used = {
        (node.attr, path)
        for path, tree in elsewhere
        if path.startswith("engine_bridge/driver")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not is_super(node.value)
    }
    ours = {name for _, tree in elsewhere for name in made(tree)}
    listed = {use.name for owner in ALL for use in owner.uses}
    assert sorted((name, path) for name, path in used if name not in ours | listed | OTHERS) == []


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def made(tree: ast.Module) -> Iterator[str]:
    """Private names that a file of ours defines, or sets on its own objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_nothing_is_in_the_inventory_that_nobody_uses() -> None:
    """Or it would grow for ever, and turn off what works."""
    spelled = {text for _, tree in trees(ELSEWHERE) for text in words(tree)}
    benches = spelled | {
        text for _, tree in trees(sorted((ROOT / "bench").rglob("*.py"))) for text in words(tree)
    }
    unused = [
        (owner.path, use.name)
        for owner in ALL
        for use in owner.uses
        if use.how in ("read", "write", "tag", "call", "override", "replace", "implement")
        if not use.name.startswith("__")
        if use.name not in (benches if use.feature == BENCHES else spelled)
    ]
    assert unused == []


def words(tree: ast.Module) -> Iterator[str]:
    """Names, attributes, arguments, keywords, imports and texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Constant(value=str(name)):
                yield name


def test_what_is_used_of_vllm_was_looked_for_in_each_version_that_is_supported() -> None:
    changed = {path for path, _ in written().items() ^ checksums().items()}
    assert not changed, f"run `make vllm-names`: {sorted(changed)}"
