import json
from typing import Any

from engine_bridge.calls.chat_chunks import split_event


def event(delta: dict[str, Any], reason: str | None = None, **choice: Any) -> str:
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason} | choice]
    return f"data: {json.dumps({'id': 'a', 'object': 'chat.completion.chunk', 'choices': choices})}\n\n"


def choices_of(text: str, **options: Any) -> list[dict[str, Any]]:
    events = list(split_event(text, **options))
    assert all(each.startswith("data: ") and each.endswith("\n\n") for each in events)
    return [json.loads(each[6:])["choices"][0] for each in events]


def test_several_calls_and_text_come_in_chunks_of_their_own_and_each_call_has_one_entry() -> None:
    """There are clients that read the first entry only, and such that look for calls only where there is no text."""
    header = {"index": 1, "id": "d", "type": "function", "function": {"name": "g"}}
    entries = [
        {"index": 0, "function": {"arguments": "}"}},
        header,
        {"index": 1, "function": {"arguments": '{"a'}},
        {"index": 1, "id": None, "function": {"arguments": '":', "name": None}},
        {"index": 1, "function": {"arguments": None}},
    ]
    choices = choices_of(event({"content": "So:", "tool_calls": entries}, token_ids=[1, 2]))
    assert [choice["delta"] for choice in choices] == [
        {"content": "So:"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"tool_calls": [header | {"function": {"name": "g", "arguments": '{"a":'}}]},
    ]
    assert [choice.get("token_ids") for choice in choices] == [[1, 2], None, None]
    assert {choice["finish_reason"] for choice in choices} == {None}


def test_reasoning_has_both_names_that_clients_look_for_and_comes_before_the_text() -> None:
    """vLLM says the end of a thought and the beginning of the text in one chunk."""
    thought, text = choices_of(event({"reasoning": "So", "content": "Hi"}, token_ids=[1, 2]))
    assert thought["delta"] == {"reasoning": "So", "reasoning_content": "So"}
    assert text["delta"] == {"content": "Hi"}
    assert (thought["token_ids"], text.get("token_ids")) == ([1, 2], None)


def test_the_reason_of_the_end_comes_last_and_alone() -> None:
    for delta in ({"content": "."}, {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}):
        first, last = choices_of(event(delta, "stop", stop_reason=7))
        assert first["finish_reason"] is None and first["delta"]
        assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", 7)
    (only,) = choices_of(event({}, "length"))
    assert (only["delta"], only["finish_reason"]) == ({}, "length")


def test_the_token_that_ends_an_answer_has_no_log_probability_as_it_has_no_text() -> None:
    content = [{"token": "you?", "logprob": -0.1}, {"token": "<|end|>", "logprob": -0.2}]
    ended = event({"content": "you?"}, "stop", logprobs={"content": content})
    first, last = choices_of(ended)
    assert first["logprobs"] == {"content": content[:1]} and last["logprobs"] is None
    assert choices_of(ended, has_stop_token=True)[0]["logprobs"]["content"] == content
    for reason, stop_reason in (("length", None), ("stop", "a stop string")):
        cut = event({"content": "you?"}, reason, logprobs={"content": content}, stop_reason=stop_reason)
        assert choices_of(cut)[0]["logprobs"]["content"] == content
    (alone,) = choices_of(event({}, "stop", logprobs={"content": content[1:]}))
    assert alone["logprobs"] is None


def test_what_is_no_chunk_passes_as_it_is() -> None:
    for text in ("data: [DONE]\n\n", 'data: {"error":{"message":"no"}}\n\n'):
        assert list(split_event(text)) == [text]
    usage = 'data: {"id":"a","choices":[],"usage":{"total_tokens":3}}\n\n'
    assert json.loads(next(split_event(usage))[6:])["usage"] == {"total_tokens": 3}
