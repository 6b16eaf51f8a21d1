"""Compares signatures: whether vLLM's functions still take our arguments, and whether our functions still take vLLM's."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from inspect import Parameter

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_HAS_DEFAULT = None  # the value of the default does not matter


@cache
def parsed(text: str) -> tuple[Parameter, ...]:
    """Return parameters as they are written between parentheses."""
    function = ast.parse(f"def f({text}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return parameters_of(function.args)


def parameters_of(args: ast.arguments) -> tuple[Parameter, ...]:
    """Return the parameters of a function in the source."""
    found = []
    positional = [*args.posonlyargs, *args.args]
    num_required = len(positional) - len(args.defaults)
    for number, arg in enumerate(positional):
        is_positional_only = number < len(args.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if is_positional_only else Parameter.POSITIONAL_OR_KEYWORD
        found.append(_parameter(arg.arg, kind, number >= num_required))
    if args.vararg is not None:
        found.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg.arg, Parameter.KEYWORD_ONLY, default is not None))
    if args.kwarg is not None:
        found.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return tuple(found)


def field_parameter(name: str, has_default: bool) -> Parameter:
    """Return the parameter for a field of a class whose constructor is made from its fields."""
    return _parameter(name, Parameter.POSITIONAL_OR_KEYWORD, has_default)


def _parameter(name: str, kind: int, has_default: bool) -> Parameter:
    return Parameter(name, kind, default=_HAS_DEFAULT if has_default else Parameter.empty)  # type: ignore[arg-type]


def call_problem(theirs: Sequence[Parameter], ours: Sequence[Parameter]) -> str | None:
    """Return why our call does not fit vLLM's function; None if it fits."""
    positional = [each for each in theirs if each.kind in POSITIONAL]
    given = [each.name for each in ours if each.kind in POSITIONAL]
    by_name = {each.name for each in ours if each.kind is Parameter.KEYWORD_ONLY}
    for number, name in enumerate(given):
        if number < len(positional) and positional[number].name != name:
            return f"its argument {number + 1} is {positional[number].name}, we give it {name}"
    if len(given) > len(positional) and not _has(theirs, Parameter.VAR_POSITIONAL):
        return f"it takes {len(positional)} arguments by position, we give it {len(given)}"
    takes = {each.name for each in (*positional[len(given) :], *_of_kind(theirs, Parameter.KEYWORD_ONLY))}
    unknown = by_name - takes
    if unknown and not _has(theirs, Parameter.VAR_KEYWORD):
        return f"it does not take {_listed(unknown)}"
    lacking = {each.name for each in theirs if _is_required(each)} - by_name - set(given)
    return f"it also wants {_listed(lacking)}" if lacking else None


def override_problem(theirs: Sequence[Parameter], ours: Sequence[Parameter]) -> str | None:
    """Return why a call that fits vLLM's function may not fit ours, which takes its place; None if it always fits."""
    positional = [each for each in ours if each.kind in POSITIONAL]
    has_args, has_kwargs = _has(ours, Parameter.VAR_POSITIONAL), _has(ours, Parameter.VAR_KEYWORD)
    for number, each in enumerate(each for each in theirs if each.kind in POSITIONAL):
        mine = positional[number] if number < len(positional) else None
        if mine is None:
            if not has_args or (each.kind is Parameter.POSITIONAL_OR_KEYWORD and not has_kwargs):
                return f"it also takes {each.name}"
        elif mine.name != each.name:
            return f"its argument {number + 1} is {each.name}, ours {mine.name}"
        elif _is_required(mine) and not _is_required(each):
            return f"{each.name} may be left out, ours may not"
    names = {each.name for each in ours}
    for each in _of_kind(theirs, Parameter.KEYWORD_ONLY):
        if each.name not in names and not has_kwargs:
            return f"it also takes {each.name}"
    if (_has(theirs, Parameter.VAR_KEYWORD) and not has_kwargs) or (
        _has(theirs, Parameter.VAR_POSITIONAL) and not has_args
    ):
        return "it takes any others, too"
    unknown = {each.name for each in ours if _is_required(each)} - {each.name for each in theirs}
    return f"it no longer takes {_listed(unknown)}" if unknown else None


def _of_kind(parameters: Sequence[Parameter], kind: int) -> list[Parameter]:
    return [each for each in parameters if each.kind is kind]


def _has(parameters: Sequence[Parameter], kind: int) -> bool:
    return bool(_of_kind(parameters, kind))


def _is_required(parameter: Parameter) -> bool:
    is_one = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return is_one and parameter.default is Parameter.empty


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
