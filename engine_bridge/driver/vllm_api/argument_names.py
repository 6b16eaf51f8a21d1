"""The names of vLLM's engine arguments, read from its source: importing it takes seconds, and the engine's environment has to be set before."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def engine_arguments() -> Mapping[str, bool]:
    """Return for each field of vLLM's `EngineArgs` whether it is a switch, that is, a flag without a value; nothing where no vLLM is installed."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "EngineArgs")
    return {
        field.target.id: ast.unparse(field.annotation) in ("bool", "bool | None")
        for found in classes
        for field in found.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
