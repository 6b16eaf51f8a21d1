"""Finds the names of the inventory that have moved: in the vLLM that can be imported, and in an engine that was built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import Parameter, signature
from typing import Any

from msgspec import Struct

from engine_bridge.driver.vllm_api.features import Feature
from engine_bridge.driver.vllm_api.live import Live
from engine_bridge.driver.vllm_api.uses import Owner, Use

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_Parameters = tuple[Parameter, ...]


class Finding(Struct, frozen=True):
    """A name that has moved. `problem`: how, as the end of a sentence."""

    path: str
    name: str
    problem: str
    feature: Feature

    @property
    def where(self) -> str:
        """The name's place, as a reader of vLLM would look for it."""
        dotted = self.path.replace(":", ".")
        return f"{dotted}.{self.name}" if self.name else dotted

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


def check(owners: Iterable[Owner]) -> list[Finding]:
    """Return all names that have moved, in the inventory's order. Imports all modules of the owners, so the environment must be set."""
    return [finding for owner in owners for finding in _check_owner(owner)]


def _check_owner(owner: Owner) -> Iterator[Finding]:
    try:
        live = Live.of(owner)
    except Exception as error:  # a module of vLLM may raise any error when it is imported
        first_line = str(error).strip().split("\n", 1)[0][:200]
        problem = f"it cannot be imported: {type(error).__name__}: {first_line}"
        # There is a finding for each feature that needs anything of this owner.
        for feature in dict.fromkeys((owner.feature, *(use.feature for use in owner.uses))):
            yield Finding(owner.path, "", problem, feature)
        return
    for use in owner.uses:
        if (found := _problem(live, use)) is not None:
            yield Finding(owner.path, use.by or use.name, found, use.feature)
    implemented = {use.name for use in owner.uses if use.how in ("implement", "override")}
    new = live.abstract_names() - implemented if implemented else frozenset()
    if new:
        yield Finding(owner.path, "", f"it also wants {_listed(new)} of a subclass", owner.feature)


def _problem(live: Live, use: Use) -> str | None:
    if use.how == "look up":
        is_asked = live.has(use.by) and live.mentions(use.by, use.name)
        return None if is_asked else f"it no longer looks up {use.name}"
    if use.how == "tag":
        return None if live.takes_tags() else f"it takes no attribute {use.name} of ours"
    if use.parameters is None:
        return None if live.has(use.name) else "it is gone"
    theirs = live.parameters(use.name)
    if theirs is None:
        return "it is no function any more" if live.has(use.name) else "it is gone"
    # The inventory's own text, in which Python's grammar for parameters is used.
    ours = tuple(signature(eval(f"lambda {use.parameters}: None")).parameters.values())
    return _call_problem(theirs, ours) if use.how == "call" else _override_problem(theirs, ours)


# -- a built engine ----------------------------------------------------------------------------------------------------


def check_engine(owners: Iterable[Owner], engine: Any) -> list[Finding]:
    """Check a built `LLMEngine`: whether its own objects are where we look for them and have the names that we read."""
    findings = []
    for owner in owners:
        if not owner.at and owner.class_name != "LLMEngine":
            continue
        found, lacking = _walk(engine, owner.at)
        if lacking:
            findings.append(Finding(owner.path, "", f"the engine has none at {lacking}", owner.feature))
            continue
        for use in owner.uses:
            if use.how in ("read", "write", "call", "override") and not hasattr(found, use.name):
                findings.append(Finding(owner.path, use.name, "the engine's own has none", use.feature))
    return findings


def _walk(engine: Any, path: str) -> tuple[Any, str]:
    """Return the object at the end of a path of attributes, and ""; or None and the path up to its first missing attribute."""
    found, done = engine, []
    for name in path.split(".") if path else ():
        done.append(name)
        if not hasattr(found, name):
            return None, ".".join(done)
        found = getattr(found, name)
    return found, ""


# -- signatures --------------------------------------------------------------------------------------------------------


def _call_problem(theirs: _Parameters, ours: _Parameters) -> str | None:
    """Return why our call does not fit vLLM's function; None if it fits."""
    positional = [each.name for each in theirs if each.kind in _POSITIONAL]
    given = [each.name for each in ours if each.kind in _POSITIONAL]
    by_name = {each.name for each in ours if each.kind is Parameter.KEYWORD_ONLY}
    for number, (their_name, name) in enumerate(zip(positional, given, strict=False), start=1):
        if their_name != name:
            return f"its argument {number} is {their_name}, we give it {name}"
    if len(given) > len(positional) and not _has(theirs, Parameter.VAR_POSITIONAL):
        return f"it takes {len(positional)} arguments by position, we give it {len(given)}"
    by_keyword = {each.name for each in theirs if each.kind is Parameter.KEYWORD_ONLY}
    unknown = by_name - {*positional[len(given) :], *by_keyword}
    if unknown and not _has(theirs, Parameter.VAR_KEYWORD):
        return f"it does not take {_listed(unknown)}"
    lacking = {each.name for each in theirs if _is_required(each)} - by_name - set(given)
    return f"it also wants {_listed(lacking)}" if lacking else None


def _override_problem(theirs: _Parameters, ours: _Parameters) -> str | None:
    """Return why a call that fits vLLM's function may not fit ours, which takes its place; None if it always fits."""
    positional = [each for each in ours if each.kind in _POSITIONAL]
    has_args, has_kwargs = _has(ours, Parameter.VAR_POSITIONAL), _has(ours, Parameter.VAR_KEYWORD)
    for number, each in enumerate(each for each in theirs if each.kind in _POSITIONAL):
        mine = positional[number] if number < len(positional) else None
        if mine is None:
            if not has_args or (each.kind is Parameter.POSITIONAL_OR_KEYWORD and not has_kwargs):
                return f"it also takes {each.name}"
        elif mine.name != each.name:
            return f"its argument {number + 1} is {each.name}, ours {mine.name}"
        elif _is_required(mine) and not _is_required(each):
            return f"{each.name} may be left out, ours may not"
    names = {each.name for each in ours}
    for each in theirs:
        if each.kind is Parameter.KEYWORD_ONLY and each.name not in names and not has_kwargs:
            return f"it also takes {each.name}"
    if (_has(theirs, Parameter.VAR_KEYWORD) and not has_kwargs) or (
        _has(theirs, Parameter.VAR_POSITIONAL) and not has_args
    ):
        return "it takes any others, too"
    unknown = {each.name for each in ours if _is_required(each)} - {each.name for each in theirs}
    return f"it no longer takes {_listed(unknown)}" if unknown else None


def _has(parameters: _Parameters, kind: int) -> bool:
    return any(each.kind is kind for each in parameters)


def _is_required(parameter: Parameter) -> bool:
    is_one = parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return is_one and parameter.default is Parameter.empty


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
