"""What of servers' tools a model is offered, and what a result and a server's address become: pure functions."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from gateway.tools.addresses import parse_mcp_servers
from gateway.tools.catalog import (
    MAX_LISTED,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    ListedTool,
    is_usable,
    offer,
    offered_name,
    usable,
)
from gateway.tools.results import NOTHING, cut, text_of

PATH: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        "object",
        {"type": "array"},
        {"properties": []},
        {"properties": {"a": "string"}},
        {"properties": {}, "required": "a"},
        {"properties": {}, "required": [1]},
        {"properties": {"a": {"description": "x" * 20_000}}},
        deep(40),
    ],
)
def test_a_schema_that_no_template_could_render_is_left_out(schema: Any) -> None:
    assert not is_usable(schema)
    tools, num_unusable = usable("files", [ListedTool("bad", "", schema), ListedTool("read", "", PATH)])
    assert [tool.tool for tool in tools] == ["read"] and num_unusable == 1
    assert all(is_usable(good) for good in (PATH, {}, {"type": "object"}, deep(5)))


def test_names_begin_with_the_servers_and_are_never_shared() -> None:
    """Also where two tools of one server differ in characters that no name may have, or behind the longest name."""
    long = "x" * 100
    listed = [
        ListedTool(name, "", PATH) for name in ("read", "re/ad", "re ad", long + "1", long + "2", "read")
    ]
    tools = [*usable("files", listed)[0], *usable("wiki", listed)[0]]
    names = [tool.offered.name for tool in tools]
    assert names[:3] == ["files__read", "files__re_ad", "files__re_ad_2"] and "wiki__read" in names
    assert len(set(names)) == len(names) == 10 and max(map(len, names)) == MAX_NAME_CHARS
    assert offered_name("a", "b", ["a__b", "a__b_2"]) == "a__b_3"


def test_what_does_not_fit_is_said_and_servers_take_turns_in_their_order() -> None:
    many = usable("files", [ListedTool(f"t{number}", "", PATH) for number in range(900)])[0]
    few = usable("wiki", [ListedTool("find", "", PATH)])[0]
    made = offer({"wiki": few, "files": many}, {"down": "down cannot be reached."}, 100_000)
    assert len(made.tools) == MAX_TOOLS and "wiki__find" in made.tools
    assert made.missing == {
        "down": "down cannot be reached.",
        "files": f"files has 900 tools; {MAX_TOOLS - 1} of them are offered, because no more fit.",
    }
    assert len(offer({"files": many}, {}, 500).tools) < 10, "descriptions are bounded, too"


def test_no_more_tools_are_looked_at_than_can_matter() -> None:
    endless = usable("files", (ListedTool(f"t{number}", "", PATH) for number in count()))[0]
    assert len(endless) == MAX_LISTED
    missing = offer({"files": endless}, {}, 100_000).missing["files"]
    assert missing.startswith("files has 1,000 tools or more; ")


def test_a_tool_that_says_something_else_of_itself_is_another_one() -> None:
    ((first,), _), ((other,), _) = (
        usable("files", [ListedTool("read", about, PATH)]) for about in ("a", "b")
    )
    assert first.key != other.key and first.key.startswith("files/read#")


def test_a_result_is_its_texts_and_what_else_it_has_is_named() -> None:
    text, link = {"type": "text", "text": "a"}, {"type": "resource_link", "uri": "file:///x"}
    resource = {"type": "resource", "resource": {"uri": "file:///x", "text": "b"}}
    picture = {"type": "image", "data": "…", "mimeType": "image/png"}
    said = text_of({"content": [text, resource, picture, link]})
    assert said == "a\nb\n[A result of the kind image is left out.]\n[A link to a resource: file:///x]"
    assert text_of({"content": [], "structuredContent": {"a": "ü"}}) == '{"a": "ü"}'
    assert text_of({}) == NOTHING


def test_a_long_result_is_cut_between_characters_and_says_so() -> None:
    assert cut("äöü", 6) == "äöü"
    assert cut("äöü", 3).startswith("ä\n[Cut here: the result has 6 bytes")
    assert cut("a\ud800", 100) == "a\ud800", "lone surrogates are for the store to mend"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("files", "http:// or https://"),
        ("http://secret@x/mcp", "NAME=URL"),
        ("a b=http://x/mcp", "letters, digits and dashes"),
        ("a_b=http://x/mcp", "letters, digits and dashes"),
        ("files=ftp://secret@x", "http:// or https://"),
        ("files=http://", "http:// or https://"),
        ("files=http://x:99999/", "http:// or https://"),
    ],
)
def test_a_server_that_cannot_be_meant_is_refused_without_quoting_its_address(
    entry: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        parse_mcp_servers([entry])
    assert "secret" not in str(refused.value)


def test_servers_keep_their_order_and_a_name_is_given_once() -> None:
    assert list(parse_mcp_servers(["b=http://x/mcp", "a=https://y"])) == ["b", "a"]
    with pytest.raises(ValueError, match="twice"):
        parse_mcp_servers(["a=http://x", "a=http://y"])
