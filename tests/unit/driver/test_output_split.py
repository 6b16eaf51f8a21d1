from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from engine_bridge.driver.apis.cut_calls import with_cut_calls
from engine_bridge.driver.apis.output_split import OutputSplit
from engine_bridge.driver.apis.tool_calls import install_tool_parser
from engine_bridge.protocol.engine_request import CalledTool
from engine_bridge.settings.parser_choice import Choice

MODEL = Path(__file__).parents[3] / "demo" / "model"
REQUEST = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
THOUGHT, ANSWER = "What is good here?\nA greeting.", "Hello! How are you?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(MODEL)
    found.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return found


def split_of(name: str, tokenizer: Any) -> OutputSplit:
    names = {"tool_parser_name": None, "reasoning_parser_name": name}
    parser = ParserManager.get_parser(**names, enable_auto_tools=False)
    return OutputSplit(parser(tokenizer, None, chat_template_kwargs={}, model_config=None), REQUEST)


def outputs(tokenizer: Any, text: str, size: int) -> list[Any]:
    """As the engine gives them: some tokens at a time, the last one finished."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    texts = [SimpleNamespace(text=tokenizer.decode(part), token_ids=part) for part in parts]
    answers = {"prompt_token_ids": [3]}
    return [SimpleNamespace(**answers, outputs=[text], finished=text is texts[-1]) for text in texts]


def joined(split: OutputSplit, given: list[Any]) -> tuple[str, str]:
    pairs = [split(output) for output in given]
    return "".join(reasoning for reasoning, _ in pairs), "".join(text for _, text in pairs)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_reasoning_is_what_stands_between_the_marks(tokenizer: Any, name: str, size: int) -> None:
    """An answer that ends while the model thinks has no text."""
    for text, wanted in ((f"<think>{THOUGHT}</think>{ANSWER}", ANSWER), (f"<think>{THOUGHT}", "")):
        if wanted or name == "deepseek_r1":
            reasoning, found = joined(split_of(name, tokenizer), outputs(tokenizer, text, size))
            assert (reasoning.strip(), found.strip()) == (THOUGHT, wanted)


def test_an_answer_is_never_lost_to_a_parser_that_fails(tokenizer: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise IndexError("a mistake")

    failing = OutputSplit(SimpleNamespace(parse_delta=fail), REQUEST)
    assert joined(failing, outputs(tokenizer, ANSWER, 2)) == ("", ANSWER)


WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("before", ["", "Let me look."])
def test_calls_of_tools_are_no_text_and_come_whole(tokenizer: Any, before: str, size: int) -> None:
    """Also where text stands before them; what is no call stays text."""
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    request = ChatCompletionRequest.model_validate(body)
    names = {"tool_parser_name": "hermes", "reasoning_parser_name": None}
    parser = ParserManager.get_parser(**names, enable_auto_tools=True)

    def split_of_answer(text: str) -> tuple[str, tuple[CalledTool, ...]]:
        split = OutputSplit(
            parser(tokenizer, request.tools, chat_template_kwargs={}, model_config=None), request
        )
        return joined(split, outputs(tokenizer, text, size))[1], split.calls()

    text, (call,) = split_of_answer(before + CALL)
    assert (text.strip(), call.name, call.arguments) == (
        before,
        "get_weather",
        '{"city": "Oslo"}',
    ) and call.id
    assert split_of_answer(ANSWER) == (ANSWER, ())


def whole_and_streamed(tokenizer: Any, text: str, request: Any) -> tuple[Any, Any]:
    """What the parser has of an answer that ends here, as a whole and piece by piece: its text, and its calls by name and arguments."""
    found = ParserManager.get_parser(
        tool_parser_name="hermes", reasoning_parser_name=None, enable_auto_tools=True
    )

    def parser() -> Any:
        return with_cut_calls(found)(tokenizer, request.tools, chat_template_kwargs={}, model_config=None)

    _, content, calls = parser().parse(text, request, enable_auto_tools=True)
    split = OutputSplit(parser(), request)
    streamed = joined(split, outputs(tokenizer, text, 3))[1]
    return (content or "", [(call.name, call.arguments) for call in calls or ()]), (
        streamed,
        [(call.name, call.arguments) for call in split.calls()],
    )


@pytest.mark.parametrize("before", ["", "Let me look. "])
def test_a_whole_reply_has_the_same_of_a_call_that_was_cut_as_a_stream(tokenizer: Any, before: str) -> None:
    body: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    install_tool_parser(Choice("hermes", ""), tokenizer)
    asked = ChatCompletionRequest.model_validate(body)
    demanded = ChatCompletionRequest.model_validate(body | {"tool_choice": "required"})
    written = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    for request, text in ((asked, before + CALL), (demanded, written)):
        for length in range(len(before) + 1, len(text) + 1):
            whole, streamed = whole_and_streamed(tokenizer, text[:length], request)
            has_begun = length > text.index(
                "{", text.index("get_weather")
            )  # its arguments: before, a stream may close empty ones
            if has_begun or not whole[1]:
                assert whole == streamed or length <= len(before) + len("<tool_call>"), text[:length]
        assert whole[1] == [("get_weather", '{"city": "Oslo"}')]


def test_a_call_that_came_whole_and_cannot_be_read_stays_text(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install_tool_parser(Choice("hermes", ""), tokenizer)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    wrong = "<tool_call>weather!</tool_call>"
    caplog.set_level("INFO")
    assert whole_and_streamed(tokenizer, wrong, ChatCompletionRequest.model_validate(body))[0] == (wrong, [])
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("after", ["", f"</think>{ANSWER}"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_all_tokens_of_a_thought_are_counted_whatever_comes_together(
    tokenizer: Any, size: int, after: str
) -> None:
    found = ParserManager.get_parser(tool_parser_name=None, reasoning_parser_name="qwen3")
    parser = with_cut_calls(found)(tokenizer, None, chat_template_kwargs={}, model_config=None)
    ids = [*tokenizer.encode(THOUGHT + after, add_special_tokens=False), tokenizer.eos_token_id]
    for start in range(0, len(ids), size):
        piece, is_last = ids[start : start + size], start + size >= len(ids)
        text = tokenizer.decode(piece[: -1 if is_last else None])
        parser.parse_delta(text, piece, REQUEST, [tokenizer.eos_token_id], finished=is_last)
    assert parser.count_reasoning_tokens(ids) == len(tokenizer.encode(THOUGHT, add_special_tokens=False))
