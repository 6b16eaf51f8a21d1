"""Finds the names of the inventory that have moved in a vLLM: by import in the vLLM that serves (`Live`), or by its source in any (`Source`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import Parameter
from typing import Any, Protocol

from msgspec import Struct

from engine_bridge.driver.vllm_api.features import Feature
from engine_bridge.driver.vllm_api.signatures import call_problem, override_problem, parsed
from engine_bridge.driver.vllm_api.uses import Owner, Use


class Facts(Protocol):
    """Facts about one vLLM. All methods but `problem` are called only for owners without a problem."""

    def problem(self, owner: Owner) -> str | None:
        """Return why there is no such module or class; None: it exists."""
        ...

    def has(self, owner: Owner, name: str) -> bool:
        """Return whether the owner has this name: a module's, a class's, or an attribute that its objects are given."""
        ...

    def parameters(self, owner: Owner, name: str) -> tuple[Parameter, ...] | None:
        """Return a function's parameters without `self`. None: the name is no function."""
        ...

    def mentions(self, owner: Owner, by: str, name: str) -> bool:
        """Return whether the owner's function `by` looks this name up."""
        ...

    def abstract_names(self, owner: Owner) -> frozenset[str]:
        """Return the methods that this class leaves to its subclasses."""

    def takes_tags(self, owner: Owner) -> bool:
        """Return whether the class's objects take attributes that it does not know."""
        ...


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


def check(owners: Iterable[Owner], facts: Facts) -> list[Finding]:
    """Return all names that have moved, in the inventory's order."""
    return [finding for owner in owners for finding in _check_owner(owner, facts)]


def _check_owner(owner: Owner, facts: Facts) -> Iterator[Finding]:
    problem = facts.problem(owner)
    if problem is not None:
        # There is a finding for each feature that needs anything of this owner.
        for feature in dict.fromkeys((owner.feature, *map(owner.feature_of, owner.uses))):
            yield Finding(owner.path, "", problem, feature)
        return
    for use in owner.uses:
        problem = _problem(owner, use, facts)
        if problem is not None:
            yield Finding(owner.path, use.by or use.name, problem, owner.feature_of(use))
    implemented = {use.name for use in owner.uses if use.how == "implement"}
    new = facts.abstract_names(owner) - implemented if implemented else frozenset()
    if new:
        yield Finding(owner.path, "", f"it also wants {', '.join(sorted(new))} of a subclass", owner.feature)


def _problem(owner: Owner, use: Use, facts: Facts) -> str | None:
    if use.how == "look up":
        is_asked = facts.has(owner, use.by) and facts.mentions(owner, use.by, use.name)
        return None if is_asked else f"it no longer looks up {use.name}"
    if use.how == "tag":
        return None if facts.takes_tags(owner) else f"it takes no attribute {use.name} of ours"
    if use.parameters is None:
        return None if facts.has(owner, use.name) else "it is gone"
    theirs = facts.parameters(owner, use.name)
    if theirs is None:
        return "it is no function any more" if facts.has(owner, use.name) else "it is gone"
    compare = call_problem if use.how == "call" else override_problem
    return compare(theirs, parsed(use.parameters))


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
                findings.append(
                    Finding(owner.path, use.name, "the engine's own has none", owner.feature_of(use))
                )
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
