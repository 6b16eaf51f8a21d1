"""How the inventory is written: an owner of names on each line that begins at the left, and below it, indented, what we do with its names.

    vllm.v1.core.sched.scheduler:Scheduler ENGINE at engine_core.engine_core.scheduler
        call has_requests()
        PACE: write max_num_scheduled_tokens
        SCHEDULING: look up in schedule: waiting peek_request

An owner is a module, or a class behind a colon. It is followed by the feature of `features.py` that does not work without it, and by the place of an
engine's own instance, as attributes from the `LLMEngine` on. A use may belong to another feature. Lines that are indented further continue the line
above; `#` begins a comment. The uses are:

- `read`, `write`, `call`: we do that with the name; `tag`: we add this attribute to vLLM's object;
- `override`: our subclass does; `implement`: the same for an abstract method without its parameters. Of a class with such uses all abstract methods
  are named: if vLLM adds one, our class cannot be built;
- `replace`: we put our own in the name's place;
- `look up in f`: vLLM's function `f` must still look the name up when it runs, or ours is never called.

Signatures are written as Python has them, without `self`. A call's signature is our call: arguments in front of `*` go by position, arguments behind
it by name. An override's or a replacement's signature is that of our own function, which vLLM calls. A name without parentheses is no function, or
its parameters are not compared.
"""

from __future__ import annotations

import re

from msgspec import Struct

from engine_bridge.driver.vllm_api import features
from engine_bridge.driver.vllm_api.features import Feature

_OWNER = re.compile(r"(?P<path>\S+) (?P<feature>\w+)(?: at (?P<at>\S+))?")
_USE = re.compile(
    r"(?:(?P<feature>[A-Z_]+): )?(?P<how>read|write|tag|call|override|implement|replace|look up(?= in))(?: in (?P<by>\w+):)? (?P<names>.+)"
)
_NAME = re.compile(r"(\w+)(?:\(([^)]*)\))?")


class Use(Struct, frozen=True):
    """One name of an owner, and the feature that needs it.

    Attributes:
        parameters: the parameters of a call, an override or a replacement; None: they are not compared.
        by: the function that looks the name up.
    """

    how: str
    name: str
    parameters: str | None
    by: str
    feature: Feature


class Owner(Struct, frozen=True):
    """A module or class of vLLM's, and all that we use of it.

    Attributes:
        feature: the feature that does not work without it.
        at: where an engine's own instance is found, as attributes from the `LLMEngine` on; empty where there is none.
    """

    path: str
    feature: Feature
    at: str
    uses: tuple[Use, ...]

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.path.partition(":")[0]

    @property
    def class_name(self) -> str:
        """The class's name; empty for a module."""
        return self.path.partition(":")[2]


def owners(text: str) -> tuple[Owner, ...]:
    """Return the owners that a text of the inventory names. Raises ValueError for a line that cannot be read."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    blocks = re.findall(r"^\S.*(?:\n .*)*", "\n".join(lines), re.MULTILINE)
    return tuple(map(_owner, blocks))


def _owner(block: str) -> Owner:
    # A line indented by eight blanks continues the line above it.
    head, *lines = re.sub(r"\n {8,}", " ", block).split("\n")
    found = _OWNER.fullmatch(head)
    if found is None:
        raise ValueError(f"no owner of names: {head}")
    feature: Feature = getattr(features, found["feature"])
    uses = tuple(use for line in lines for use in _uses(line.strip(), feature))
    return Owner(found["path"], feature, found["at"] or "", uses)


def _uses(line: str, usual: Feature) -> list[Use]:
    found = _USE.fullmatch(line)
    if found is None:
        raise ValueError(f"no use of names: {line}")
    feature = getattr(features, found["feature"]) if found["feature"] else usual
    return [
        Use(
            found["how"], each[1], each[2], found["by"] or "", feature
        )  # a name without parentheses has no group 2
        for each in _NAME.finditer(found["names"])
    ]
