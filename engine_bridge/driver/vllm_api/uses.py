"""The words in which the inventory says what is used of vLLM.

Signatures are written as Python has them, without `self`. A call's is how we call: what stands in front of `*` goes by position, what stands
behind it by name. An override's or a replacement's is that of our own function, which vLLM calls.
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
        how: `read`, `write` and `call` as we do it; `tag`: an attribute that we add to vLLM's object; `override` in a subclass; `replace`: we put our
            own in its place; `look up`: vLLM's function `by` must still look the name up when it runs, or ours is never asked; `implement`: an
            abstract method that our subclass has.
        parameters: of a call, an override or a replacement; None: not looked at.
        feature: that needs it, where it is not the owner's.
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
        feature: what does not work without it.
        at: where an engine's own instance is found, as attributes from the `LLMEngine` on; empty where there is none.
    """

    path: str
    feature: Feature
    uses: tuple[Use, ...] = ()
    at: str = ""

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def class_name(self) -> str:
        """Empty for a module."""
        return self.path.partition(":")[2]

    def feature_of(self, use: Use) -> Feature:
        return use.feature or self.feature


def owner(path: str, feature: Feature, *uses: tuple[Use, ...], at: str = "") -> Owner:
    """With the uses of all groups."""
    return Owner(path, feature, tuple(use for group in uses for use in group), at)


def _named(how: How, names: str, feature: Feature | None = None) -> tuple[Use, ...]:
    return tuple(Use(how=how, name=name, feature=feature) for name in names.split())


reads = partial(_named, "read")
writes = partial(_named, "write")
tags = partial(_named, "tag")
implements = partial(_named, "implement")
"""All abstract methods of a class that we subclass: one more, and ours cannot be built."""
overrides_values = partial(_named, "override")
"""Class attributes and properties of a subclass of ours in place of vLLM's."""


def _signed(how: How, *signatures: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Without parentheses: nothing is said of parameters."""
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
"""Without parentheses: something that is no function, or a function whose parameters are those of the class that takes its place."""


def builds(parameters: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Calls of the class."""
    return (Use(how="call", name="__init__", parameters=parameters, feature=feature),)


def looks_up(by: str, names: str, feature: Feature | None = None) -> tuple[Use, ...]:
    """Uses that only read these names, which are separated by spaces, in the module `by`."""
    return tuple(Use(how="look up", name=name, by=by, feature=feature) for name in names.split())
