"""Which tools of which servers a model is offered, under which names, and what is left out and why. Pure: lists of servers in, an offer out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from engine_bridge.protocol.engine_request import OfferedTool

# Chosen: models choose badly among more, and each takes some hundred tokens of every prompt.
MAX_TOOLS = 64
# Tools of one server that are looked at. Chosen: the model is offered a few dozen of all.
MAX_LISTED = 1000
# The longest name of a function in OpenAI's API, which chat templates and parsers follow.
MAX_NAME_CHARS = 64
# Of a tool's description; of the JSON text of its schema; levels of its schema. Chosen: ten times what published servers have.
MAX_DESCRIPTION_CHARS, MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH = 2048, 16_384, 24
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")


class ListedTool(NamedTuple):
    """A tool as its server lists it, not checked yet."""

    name: str
    description: str
    schema: Any


class ServerTool(NamedTuple):
    """A tool that can be offered. tool: its name on the server. offered: what the model is told of it."""

    server: str
    tool: str
    offered: OfferedTool

    @property
    def key(self) -> str:
        """The name under which a person has allowed the tool. It changes with what the tool says of itself: another tool is asked for anew."""
        said = json.dumps([self.offered.description, self.offered.parameters], sort_keys=True)
        return f"{self.server}/{self.tool}#{hashlib.sha256(said.encode('utf-8', 'replace')).hexdigest()[:12]}"


class Offer(NamedTuple):
    """The tools of one turn, by the names that the model calls them by, and for the person a sentence for each server that lacks some."""

    tools: Mapping[str, ServerTool]
    missing: Mapping[str, str]

    @property
    def offered(self) -> tuple[OfferedTool, ...]:
        """The tools as a request has them."""
        return tuple(tool.offered for tool in self.tools.values())


NO_TOOLS = Offer({}, {})


def usable(server: str, listed: Iterable[ListedTool]) -> tuple[list[ServerTool], int]:
    """Return a server's tools that a chat template can render, and how many others there are, of the first MAX_LISTED.

    Of tools with one name the first counts.
    """
    found: dict[str, ServerTool] = {}
    names: set[str] = set()
    num_unusable = 0
    for each in islice(listed, MAX_LISTED):
        if each.name in found:
            continue
        if not each.name or not is_usable(each.schema):
            num_unusable += 1
            continue
        name = offered_name(server, each.name, names)
        names.add(name)
        offered = OfferedTool(name, each.description[:MAX_DESCRIPTION_CHARS], each.schema)
        found[each.name] = ServerTool(server, each.name, offered)
    return list(found.values()), num_unusable


def offered_name(server: str, tool: str, taken: Collection[str]) -> str:
    """Return the name by which models call a server's tool: it begins with the server's, so that tools of two servers never share one."""
    name = _OTHER.sub("_", f"{server}__{tool}")[:MAX_NAME_CHARS]
    number, found = 2, name
    while found in taken:
        end = f"_{number}"
        found, number = name[: MAX_NAME_CHARS - len(end)] + end, number + 1
    return found


def is_usable(schema: Any) -> bool:
    """Return whether a schema describes an object as chat templates read it: named properties, each with a schema of its own."""
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(each, dict) for each in properties.values()):
        return False
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return False
    return _is_shallow(schema, MAX_SCHEMA_DEPTH) and len(json.dumps(schema)) <= MAX_SCHEMA_CHARS


def _is_shallow(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return depth > 0 and all(_is_shallow(each, depth - 1) for each in value)


def offer(
    by_server: Mapping[str, Sequence[ServerTool]], problems: Mapping[str, str], max_chars: int
) -> Offer:
    """Return the tools that a turn offers, in the servers' order.

    Args:
        by_server: the tools of each server that is switched on.
        problems: what is wrong with servers, as sentences.
        max_chars: of all descriptions and schemas together.
    """
    tools: dict[str, ServerTool] = {}
    missing = dict(problems)
    num_chars = 0
    for server, listed in by_server.items():
        num_taken = 0
        for tool in listed:
            num_chars += len(tool.offered.description) + len(json.dumps(tool.offered.parameters))
            if len(tools) >= MAX_TOOLS or num_chars > max_chars:
                break
            tools[tool.offered.name] = tool
            num_taken += 1
        if num_taken < len(listed):
            more = " or more" if len(listed) >= MAX_LISTED else ""
            said = f"{server} has {len(listed):,} tools{more}; {num_taken} of them are offered, because no more fit."
            missing[server] = " ".join(filter(None, (problems.get(server), said)))
    return Offer(tools, missing)
