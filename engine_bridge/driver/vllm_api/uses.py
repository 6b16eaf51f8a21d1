"""The words in which the inventory says how vLLM is used.

Signatures are written as Python has them, without `self`. A call's signature is our call: arguments in front of `*` go by position, arguments behind
it by name. An override's or a replacement's signature is that of our own function, which vLLM calls.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from msgspec import Struct

from engine_bridge.driver.vllm_api.features import Feature

How = Literal["read", "write", "tag", "call", "override", "replace", "look up", "implement"]


class Use(Struct, frozen=True, kw_only=True):
    """One name of an owner.

    Attributes:
        how: `read`, `write` and `call`: we do that with the name; `tag`: an attribute that we add to vLLM's object; `override`: our subclass does;
            `replace`: we put our own in its place; `look up`: vLLM's function `by` must still look the name up when it runs, or ours is never called;
            `implement`: an abstract method that our subclass has.
        parameters: the parameters of a call, an override or a replacement; None: they are not compared.
        by: the function that looks the name up.
        feature: the feature that needs it, where that is not the owner's.
    """

    how: How
    name: str
    parameters: str | None = None
    by: str = ""
    feature: Feature | None = None


class Owner(Struct, frozen=True):
    """A module or class of vLLM's, and all that we use of it.

    Attributes:
        path: `package.module` or `package.module:Class`.
        feature: the feature that does not work without it.
        uses: the names that we use.
        at: where an engine's own instance is found, as attributes from the `LLMEngine` on; empty where there is none.
    """

    path: str
    feature: Feature
    uses: tuple[Use, ...] = ()
    at: str = ""

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.path.partition(":")[0]

    @property
    def class_name(self) -> str:
        """The class's name; empty for a module."""
        return self.path.partition(":")[2]

    def feature_of(self, use: Use) -> Feature:
        """Return the feature that needs this use."""
        return use.feature or self.feature


def owner(path: str, feature: Feature, *uses: tuple[Use, ...], at: str = "") -> Owner:
    """Return an owner with the uses of all groups."""
    return Owner(path, feature, tuple(use for group in uses for use in group), at)


def _named(how: How, names: str, feature: Feature | None = None) -> tuple[Use, ...]:
    return tuple(Use(how=how, name=name, feature=feature) for name in names.split())


reads = partial(_named, "read")
writes = partial(_named, "write")
tags = partial(_named, "tag")
implements = partial(_named, "implement")
"""All abstract methods of a class that we subclass: if vLLM adds another, our subclass cannot be built."""
overrides_values = partial(_named, "override")
"""Class attributes and properties of our subclass that take the place of vLLM's."""


def _signed(how: How, *signatures: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Return uses with their signatures. A name without parentheses says nothing of its parameters."""
    uses = []
    for signature in signatures:
        name, _, parameters = signature.removesuffix(")").partition("(")
        uses.append(
            Use(how=how, name=name, parameters=parameters if "(" in signature else None, feature=feature)
        )
    return tuple(uses)


calls = partial(_signed, "call")
overrides = partial(_signed, "override")
replaces = partial(_signed, "replace")
"""Replacements. A name without parentheses is no function, or a function whose parameters are those of the class that takes its place."""


def builds(parameters: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Return the use that calls the class with these parameters."""
    return (Use(how="call", name="__init__", parameters=parameters, feature=feature),)


def looks_up(by: str, names: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Return uses of names, separated by spaces, that vLLM's function `by` must look up."""
    return tuple(Use(how="look up", name=name, by=by, feature=feature) for name in names.split())
