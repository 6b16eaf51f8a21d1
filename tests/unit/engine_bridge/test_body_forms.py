import copy
from typing import Any

import pytest

from engine_bridge.calls.body_forms import usual_form
from engine_bridge.calls.carried_thoughts import packed
from engine_bridge.protocol.errors import InvalidRequest


def formed(api: Any, **body: Any) -> dict[str, Any]:
    before = copy.deepcopy(body)
    found: dict[str, Any] = usual_form(api, body, 4096)
    assert body == before, "a body is never changed in place"
    return found


def test_null_is_as_good_as_nothing() -> None:
    assert formed("responses", input="x", truncation=None, service_tier=None, tools=None) == {"input": "x"}
    assert formed("chat", messages=[], stop=None, n=None) == {"messages": []}
    assert formed("completions", prompt="x", max_tokens=None) == {"prompt": "x", "max_tokens": None}, "vLLM's"
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    tools = [{"name": "f", "input_schema": schema, "cache_control": None}]
    assert formed("messages", messages=[], tools=tools)["tools"] == [{"name": "f", "input_schema": schema}]


def test_an_answer_that_is_sent_back_whole_has_only_what_it_says() -> None:
    answer = {"role": "assistant", "content": None, "refusal": None, "audio": None}
    (message,) = formed("chat", messages=[answer | {"tool_calls": [{"id": "c", "x": None}]}])["messages"]
    assert message == {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": None}}
    messages = [{"role": "assistant", "content": [call]}]
    assert formed("messages", messages=messages)["messages"] == messages, "a call's null is a value"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_more_tokens_than_the_model_reads_are_as_many_as_it_reads(name: str) -> None:
    for given, found in ((8000, 4096), ("8000", 4096), (1e9, 4096), (4096, 4096), (7, 7), ("x", "x")):
        assert formed("chat", **{name: given})[name] == found


def test_the_likeliest_token_alone_is_asked_for_by_a_small_number() -> None:
    for api in ("chat", "completions", "responses", "messages"):
        assert 0 < usual_form(api, {"top_p": 0}, 4096)["top_p"] < 1e-4
    assert formed("chat", top_p=0.5) == {"top_p": 0.5}


def test_calls_of_tools_in_the_form_of_ollamas_clients_are_openais() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": "é"}}}
    (message,) = formed("chat", messages=[{"role": "assistant", "tool_calls": [call]}])["messages"]
    function = {"name": "f", "arguments": '{"a": "é"}'}
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    bare = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": None}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    first, second = formed("chat", messages=[bare, result])["messages"]
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert second == {"role": "tool", "tool_call_id": "c"}


def test_an_empty_suffix_is_as_good_as_none() -> None:
    assert formed("completions", prompt="x", suffix="") == {"prompt": "x"}
    assert formed("completions", prompt="x", suffix="y") == {"prompt": "x", "suffix": "y"}


def test_a_thinking_budget_stays_below_the_clipped_answer() -> None:
    body = {"messages": [], "max_tokens": 32_000, "thinking": {"type": "enabled", "budget_tokens": 31_999}}
    found = formed("messages", **body)
    assert found["max_tokens"] == 4096 and found["thinking"] == {"type": "enabled", "budget_tokens": 4095}
    assert usual_form("messages", body, 1024)["thinking"] == {"type": "adaptive"}
    wrong = body | {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 7}}
    assert formed("messages", **wrong) == wrong, "vLLM says why not"


def test_reasoning_is_kept_whole_and_pictures_have_a_detail() -> None:
    thoughts = [{"type": "reasoning_text", "text": text} for text in ("So ", "it is.")]
    thought = {"type": "reasoning", "content": thoughts, "encrypted_content": "gAAAA"}
    picture = {"type": "input_image", "image_url": "data:,", "detail": None}
    output = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    first, second = formed("responses", input=[thought, output])["input"]
    assert first["content"] == [{"type": "reasoning_text", "text": "So it is."}] and first["summary"] == []
    assert "encrypted_content" not in first
    assert second["output"] == [picture | {"detail": "auto"}]


def test_a_thought_that_a_client_has_carried_is_read_and_what_others_have_encrypted_is_not() -> None:
    def read(**fields: Any) -> Any:
        return formed("responses", input=[{"type": "reasoning"} | fields])["input"][0].get("content")

    carried = packed("So \u2026 it is.")
    assert read(encrypted_content=carried) == [{"type": "reasoning_text", "text": "So \u2026 it is."}]
    own = [{"type": "reasoning_text", "text": "My own."}]
    assert read(encrypted_content=carried, content=own) == own
    for other in ("gAAAA", carried[:-1], carried + "\u2026", packed(""), 5):
        assert read(encrypted_content=other) is None


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_forms_of_answers_in_the_fields_of_earlier_versions_of_vllm_count(api: Any) -> None:
    for name, value in (
        ("json", {"type": "object"}),
        ("regex", "a+"),
        ("choice", ["a"]),
        ("grammar", "start: /a/"),
    ):
        assert formed(api, **{f"guided_{name}": value}) == {"structured_outputs": {name: value}}
    json_object, tool = {"type": "json_object"}, {"type": "function", "function": {"name": "f"}}
    for field, value in (
        ("structured_outputs", {"regex": "b"}),
        ("response_format", json_object),
        ("tools", [tool]),
    ):
        both = {"guided_regex": "a", field: value}
        assert formed(api, **both) == both, "vLLM refuses two at once"
    assert formed(api, guided_json=None) == {}


def test_an_empty_list_of_tools_is_as_good_as_none() -> None:
    for choice in ("auto", "none"):
        assert formed("chat", messages=[], tools=[], tool_choice=choice) == {"messages": []}
        assert formed("chat", messages=[], tool_choice=choice) == {"messages": []}
    demanded = {"messages": [], "tool_choice": "required"}
    assert formed("chat", **demanded, tools=[]) == demanded, "vLLM says that it needs tools"


SCHEMA = {"type": "object"}
UNNAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
NAMED = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": None}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, UNNAMED),
        (NAMED, NAMED),
        ({"type": "json_object", "schema": SCHEMA}, UNNAMED),
        ({"type": "json_object"}, {"type": "json_object"}),
    ],
)
def test_the_schema_of_an_answer_needs_no_name_and_may_stand_beside_json_object(
    given: Any, found: Any
) -> None:
    assert formed("chat", response_format=given)["response_format"] == found


def test_only_the_tools_that_a_choice_allows_are_offered() -> None:
    one, other = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert formed("chat", tools=[one, other], tool_choice=choice) == {
        "tools": [other],
        "tool_choice": "required",
    }
    flat = {"type": "function", "name": "a"}, {"type": "web_search"}, {"type": "function", "name": "b"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, flat[0]]}
    assert formed("responses", tools=list(flat), tool_choice=choice) == {
        "tools": list(flat[:2]),
        "tool_choice": "auto",
    }


@pytest.mark.parametrize(
    "allowed",
    [{}, {"mode": "any", "tools": []}, {"mode": "auto", "tools": "b"}, {"mode": "auto", "tools": [{}]}, "b"],
)
def test_a_choice_that_allows_no_tool_that_is_offered_is_refused(allowed: Any) -> None:
    tool = {"type": "function", "function": {"name": "b"}}
    with pytest.raises(InvalidRequest) as raised:
        formed("chat", tools=[tool], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert raised.value.param == "tool_choice"


def test_documents_and_search_results_are_text_wherever_they_stand() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Hello"}
    document = {"type": "document", "title": "T", "source": plain}
    found = {"type": "search_result", "source": "a", "title": "t"}
    found["content"] = [{"type": "text", "text": "Rome"}]
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}}
    inside = [document, found, {"type": "text", "text": "x"}]
    content = [document, parts, {"type": "tool_result", "tool_use_id": "c", "content": inside}]
    (message,) = formed("messages", messages=[{"role": "user", "content": content}])["messages"]
    first, second, third = message["content"]
    assert first == {"type": "text", "text": "T\nHello"} and second == {"type": "text", "text": "b"}
    assert [block["text"] for block in third["content"]] == ["T\nHello", "t\na\nRome", "x"]
    assert formed("count_tokens", messages=[message])["messages"] == [message]


def test_the_form_of_an_answer_may_stand_in_either_of_anthropics_fields() -> None:
    old, new = {"type": "json_schema", "schema": {}}, {"type": "json_schema", "schema": {"type": "object"}}
    for body, config in (
        ({"output_format": old}, {"format": old}),
        ({"output_format": old, "output_config": None}, {"format": old}),
        (
            {"output_format": old, "output_config": {"effort": "low", "format": None}},
            {"format": old, "effort": "low"},
        ),
        ({"output_format": old, "output_config": {"format": new}}, {"format": new}),
        ({"output_config": {"format": new}}, {"format": new}),
    ):
        assert usual_form("messages", body, 4096)["output_config"] == config


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "source": {"type": "base64", "data": "AA"}}, "text"),
        ({"type": "tool_result", "content": [{"type": "video"}]}, "video"),
        ({"type": "tool_result", "content": ["x"]}, "result"),
        ({"type": "search_result", "content": [{"type": "image"}]}, "text"),
    ],
)
def test_what_would_be_passed_over_is_refused_with_what_is_taken(block: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        formed("messages", messages=[{"role": "user", "content": [block]}])


@pytest.mark.parametrize(
    "body", [None, 7, [], {"messages": 7}, {"input": {"a": 1}}, {"messages": [7, {"content": 3}]}, {}]
)
@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "count_tokens", "tokenize"])
def test_what_is_malformed_is_left_for_vllm_to_explain(api: Any, body: Any) -> None:
    usual_form(api, body, 4096)


def test_functions_as_they_were_before_tools_are_tools() -> None:
    look = {"name": "look", "parameters": {"type": "object"}}
    offered = formed("chat", messages=[], functions=[look])
    assert offered["tools"] == [{"type": "function", "function": look}] and offered["functions"] == [look]
    assert (offered["tool_choice"], offered["parallel_tool_calls"]) == ("auto", False)
    for said, choice in (
        ("none", "none"),
        ({"name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ):
        found = formed("chat", messages=[], functions=[look], function_call=said)
        assert found["tool_choice"] == choice
    mine = formed("chat", messages=[], functions=[look], tools=[{"type": "function", "function": look}])
    assert "functions" not in mine and "tool_choice" not in mine
    assert "tools" not in formed("chat", messages=[], functions=[])
    call = {"name": "look", "arguments": "{}"}
    asked = {"role": "assistant", "content": None, "function_call": call}
    seen = {"role": "function", "name": "look", "content": "A sea."}
    history = formed("chat", messages=[asked, seen, asked | {"content": "Hm."}, seen])["messages"]
    ids = ["call00001", "call00002"]
    assert [message["tool_calls"][0]["id"] for message in history[::2]] == ids
    assert history[0]["tool_calls"] == [{"id": ids[0], "type": "function", "function": call}]
    assert [message["tool_call_id"] for message in history[1::2]] == ids
    assert history[1]["role"] == "tool" and "function_call" not in history[2]
    assert formed("chat", messages="x")["messages"] == "x"
