"""What is read from API calls so that they can be kept as turns."""

import orjson
import pytest

from gateway.errors import GatewayError
from gateway.turns.replies import AnswerReader, question_of, session_named, with_previous


def test_the_question_is_the_last_user_message() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert question_of("chat", {"messages": messages}) == "c"
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]
    assert question_of("messages", {"messages": parts}) == "x"
    assert question_of("completions", {"prompt": "p"}) == "p"
    assert question_of("responses", {"input": "i"}) == "i"
    assert (
        question_of(
            "responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "i"}]}]}
        )
        == "i"
    )


@pytest.mark.parametrize(
    "body", [{}, {"messages": None}, {"messages": "x"}, {"messages": [1, None, {"role": "user"}]}]
)
def test_a_malformed_body_has_no_question(body: dict) -> None:
    assert question_of("chat", body) == ""


def test_the_header_goes_before_the_body() -> None:
    assert session_named("h", {"session_id": "b"}) == "h"
    assert session_named(None, {"session_id": "b"}) == "b"
    assert session_named(None, {}) is None
    with pytest.raises(GatewayError):
        session_named(None, {"session_id": 7})


def test_a_chat_stream_is_put_together() -> None:
    reader = AnswerReader("chat")
    for delta in ("Hel", "lo"):
        reader.feed(
            b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {"content": delta}}]}) + b"\n\n"
        )
    reader.feed(b": keep-alive\n\n")
    assert not reader.is_complete
    reader.feed(
        b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"\n\n"
    )
    reader.feed(
        b"data: "
        + orjson.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        + b"\n\n"
    )
    reader.feed(b"data: [DONE]\n\n")
    assert (reader.answer, reader.finish_reason, reader.is_complete) == ("Hello", "stop", True)
    assert reader.usage == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}


def test_only_the_first_choice_is_kept() -> None:
    reader = AnswerReader("chat")
    reader.feed_json(
        orjson.dumps(
            {
                "choices": [
                    {"index": 1, "message": {"content": "b"}},
                    {"index": 0, "message": {"content": "a"}},
                ]
            }
        )
    )
    assert reader.answer == "a"


def test_anthropic_and_responses_streams() -> None:
    messages = AnswerReader("messages")
    messages.feed(
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'
    )
    messages.feed(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert (messages.answer, messages.is_complete) == ("hi", True)
    responses = AnswerReader("responses")
    responses.feed(
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    )
    responses.feed(b'event: x\ndata: {"type":"response.output_text.delta","delta":"yo"}\n\n')
    responses.feed(
        b'event: x\ndata: {"type":"response.completed","response":{"id":"resp_1","usage":{"input_tokens":5}}}\n\n'
    )
    assert (responses.answer, responses.response_id, responses.is_complete) == ("yo", "resp_1", True)
    assert responses.usage is not None and responses.usage["prompt_tokens"] == 5


def test_an_answer_that_is_only_the_call_of_a_tool_is_one_to_keep() -> None:
    reader = AnswerReader("chat")
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    for delta, reason in (
        ({"role": "assistant", "content": ""}, None),
        ({"tool_calls": [call]}, "tool_calls"),
    ):
        assert not reader.has_begun
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        reader.feed(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
    assert (reader.has_begun, reader.answer, reader.finish_reason) == (True, "", "tool_calls")


def test_the_response_in_an_event_says_what_it_goes_on_from() -> None:
    """Whatever else stands in the stream stays as it is, down to the byte."""
    made = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r2","previous_response_id":null}}\n\n'
    head, _, data = with_previous(made, "r1").partition(b"data: ")
    assert head == b"event: response.created\n" and data.endswith(b"}\n\n")
    assert orjson.loads(data)["response"] == {"id": "r2", "previous_response_id": "r1"}
    text = orjson.dumps({"type": "response.output_text.delta", "delta": '"previous_response_id"'})
    for other in (b": keep-alive\n\n", b"event: x\ndata: " + text + b"\n\n", b"data: [DONE]\n\n"):
        assert with_previous(other, "r1") == other
