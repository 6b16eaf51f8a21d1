"""That our code and the inventory of vLLM's names say the same, as far as the source of our code tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from engine_bridge.driver import vllm_api
from engine_bridge.driver.vllm_api.features import BENCHES
from engine_bridge.driver.vllm_api.inventory import ALL
from tests.vllm_versions import checksums, written

from .sources import nodes_by_path

API = "engine_bridge.driver.vllm_api"
# Private names of neither ours nor vLLM's: of torch, transformers, llvmlite and Python.
OTHERS = {"_C", "_exit", "_fntab", "_is_amx_tile_supported", "_commit_hash", "_make", "_replace"}

Files = list[tuple[str, tuple[ast.AST, ...]]]


@pytest.fixture(scope="module")
def elsewhere() -> Files:
    """The nodes of all files but those of the inventory and its check."""
    files = nodes_by_path("engine_bridge", "gateway", "kvtiers")
    return [(path, nodes) for path, nodes in files.items() if "vllm_api" not in path.split("/")]


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


def test_nothing_but_the_inventory_s_package_imports_vllm(elsewhere: Files) -> None:
    found = [
        (path, node.lineno)  # type: ignore[attr-defined]
        for path, nodes in elsewhere
        for node in nodes
        for module in imported(node)
        if module.split(".")[0] == "vllm"
    ]
    assert found == []


def test_every_name_that_is_asked_of_it_is_one_that_it_has(elsewhere: Files) -> None:
    asked = {
        alias.name
        for _, nodes in elsewhere
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == API
        for alias in node.names
    }
    own = {"start", "vllm_version"}
    assert asked - own - vllm_api._places().keys() == set()
    assert len(asked) > 50


def test_every_private_name_that_is_used_of_others_is_ours_or_in_the_inventory(
    elsewhere: Files,
) -> None:
    used = {
        (node.attr, path)
        for path, nodes in elsewhere
        if path.startswith("engine_bridge/driver")
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not is_super(node.value)
    }
    ours = {name for _, nodes in elsewhere for name in made(nodes)}
    listed = {use.name for owner in ALL for use in owner.uses}
    assert sorted((name, path) for name, path in used if name not in ours | listed | OTHERS) == []


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def made(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private names that a file of ours defines, or sets on its own objects."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name


def test_nothing_is_in_the_inventory_that_nobody_uses(elsewhere: Files) -> None:
    """Or it would grow for ever, and turn off what works."""
    spelled = {text for _, nodes in elsewhere for text in words(nodes)}
    benches = spelled | {text for nodes in nodes_by_path("bench").values() for text in words(nodes)}
    unused = [
        (owner.path, use.name)
        for owner in ALL
        for use in owner.uses
        if use.how in ("read", "write", "tag", "call", "override", "replace", "implement")
        if not use.name.startswith("__")
        if use.name not in (benches if use.feature == BENCHES else spelled)
    ]
    assert unused == []


def words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names, attributes, arguments, keywords, imports and texts."""
    for node in nodes:
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
