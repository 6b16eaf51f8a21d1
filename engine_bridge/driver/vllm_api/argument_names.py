"""The names of vLLM's engine arguments, read from its source: importing it takes seconds, and the engine's environment has to be set before."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Kind = Literal["switch", "value", "value or none", "values"]
"""What stands behind an argument's flag. A switch is a flag without a value."""


@cache
def engine_arguments() -> Mapping[str, Kind]:
    """Return what stands behind the flag of each field of vLLM's `EngineArgs`; nothing where no vLLM is installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "EngineArgs")
    return {
        field.target.id: _kind_of(ast.unparse(field.annotation))
        for found in classes
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


@cache
def parser_names() -> Mapping[str, Sequence[str]]:
    """Return the names of vLLM's parsers by "tool" and "reasoning"; nothing of a kind whose table is not found, or to which plugins may add."""
    spec = find_spec("vllm")
    plugins = entry_points(group="vllm.general_plugins")
    if spec is None or spec.origin is None or any(not each.value.startswith("vllm.") for each in plugins):
        return {}
    folder, found = Path(spec.origin).parent, {}
    for kind, place in {"tool": "tool_parsers", "reasoning": "reasoning"}.items():
        source = folder / place / "__init__.py"
        tree = ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
        tables = (
            each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and "_TO_REGISTER" in ast.unparse(each.targets[0])
        )
        found[kind] = [
            str(key.value)
            for table in tables
            if isinstance(table, ast.Dict)
            for key in table.keys
            if isinstance(key, ast.Constant)
        ]
    return {kind: sorted(names) for kind, names in found.items() if names}


def _kind_of(annotation: str) -> Kind:
    if annotation in ("bool", "bool | None"):
        return "switch"
    if annotation.startswith("bool |"):
        return "value or none"
    # Device ids, the only list of numbers or words, are one word with commas.
    is_several = (
        annotation.removeprefix("str | ").startswith(("list[", "set[")) and "int | str" not in annotation
    )
    return "values" if is_several else "value"
