"""The shape of the code: no circle of files, and nothing that is too long to be read at a sitting."""

import ast
from collections.abc import Iterable, Iterator, Mapping

import pytest

from .sources import ROOT, nodes_of

PACKAGES = ("gateway", "engine_bridge", "kvtiers", "bench")
# Lines that one thing may have. Chosen: a function is read on a screen, a class and a file at a sitting.
LIMITS = {"function": 60, "class": 450, "file": 600}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of every file of ours, by its path from the root."""
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def too_long(sources: Mapping[str, str]) -> set[str]:
    """Files, and the classes and functions in them, that are over the limit."""
    found = set()
    for path, text in sources.items():
        if len(text.splitlines()) > LIMITS["file"]:
            found.add(f"file {path}")
        for node in nodes_of(text):
            match node:
                case ast.ClassDef():
                    kind = "class"
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    kind = "function"
                case _:
                    continue
            if (node.end_lineno or 0) - node.lineno + 1 > LIMITS[kind]:
                found.add(f"{kind} {path} {node.name}")
    return found


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Of each module, those that it names anywhere: at the top, inside a function, or for the types alone.

    A package's own file counts as imported by its modules only where they name another package's: Python loads it before them in any case.
    """
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in sources}
    packages = {name for name, path in modules.items() if path.endswith("/__init__.py")}
    graph = {}
    for name, path in modules.items():
        home = name if name in packages else name.rpartition(".")[0]
        named = set(_named(nodes_of(sources[path]), home))
        graph[name] = {
            other
            for other in named & modules.keys()
            if other != name and not (other in packages and name.startswith(f"{other}."))
        }
    return graph


def _named(nodes: Iterable[ast.AST], home: str) -> Iterator[str]:
    """Everything that could be a module in the imports; `home` is the package that dots start from."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """The sets of modules that reach each other, sorted by name."""
    reach = {name: _reached(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return {group for group in groups if group}


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead.extend(graph[name])
    return found


def test_nothing_is_too_long(sources: dict[str, str]) -> None:
    assert not too_long(sources)


def test_no_files_import_each_other_in_a_circle(sources: dict[str, str]) -> None:
    assert not circles(imports(sources))


def test_an_import_counts_wherever_it_stands() -> None:
    sources = {
        "p/__init__.py": "",
        "p/top.py": "from p import inside",
        "p/inside.py": "def f():\n    from . import types",
        "p/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .top import A",
        "p/leaf.py": "import p.top",
    }
    assert circles(imports(sources)) == {("p.inside", "p.top", "p.types")}


def test_a_package_and_its_own_modules_are_no_circle() -> None:
    sources = {"p/__init__.py": "from p import one", "p/one.py": "import p", "p/two.py": "import p.one"}
    assert circles(imports(sources)) == set()


@pytest.mark.parametrize("kind", LIMITS)
def test_one_line_over_the_limit_is_too_long(kind: str) -> None:
    head = {"file": "0", "class": "class A:", "function": "async def f():"}[kind]
    line = "\n0" if kind == "file" else "\n    0"
    fits = {"a.py": head + line * (LIMITS[kind] - 1)}
    longer = {"a.py": head + line * LIMITS[kind]}
    assert too_long(fits) == set()
    assert {found.split()[0] for found in too_long(longer)} == {kind}
