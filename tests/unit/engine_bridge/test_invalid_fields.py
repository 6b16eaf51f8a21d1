from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from engine_bridge.calls.invalid_fields import explain


class Picture(BaseModel):
    type: Literal["picture"]
    url: str


class Words(BaseModel):
    type: Literal["words"]
    text: str


class UserMessage(BaseModel):
    role: Literal["user"]
    content: str | list[Words | Picture]


class ToolMessage(BaseModel):
    role: Literal["tool"]
    content: str
    call_id: str


class Call(BaseModel):
    messages: list[UserMessage | ToolMessage]
    temperature: float = 1.0
    n: int = 1
    stop: str | list[str] | None = None
    bias: dict[str, float] = {}
    stream: bool = False

    @field_validator("n")
    @classmethod
    def is_positive(cls, n: int) -> int:
        if n < 1:
            raise ValueError("must be at least 1.")
        return n


def explained(body: Any) -> tuple[str, str | None]:
    with pytest.raises(ValidationError) as raised:
        Call.model_validate(body)
    return explain(raised.value.errors())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("body", "text", "field"),
    [
        ([1], "The body should be an object.", None),
        ({}, "`messages` is missing.", "messages"),
        ({"messages": "hi"}, "`messages` should be a list.", "messages"),
        ({"messages": ["hi"]}, "`messages[0]` should be an object.", "messages[0]"),
        ({"messages": [user("x"), user(5)]}, "`messages[1].content` should be a string or a list.", "messages[1].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages[0].call_id` is missing.", "messages[0].call_id"),
        ({"messages": [{"role": "bogus", "content": "x"}]}, "`messages[0].role` should be 'user' or 'tool'.", "messages[0].role"),
        (
            {"messages": [user([{"type": "words", "text": "x"}, {"type": "picture"}])]},
            "`messages[0].content[1].url` is missing.",
            "messages[0].content[1].url",
        ),
        ({"messages": [], "n": 0}, "`n`: must be at least 1.", "n"),
        ({"messages": [], "bias": {"17": "x"}}, "`bias.17` should be a number.", "bias.17"),
        (
            {"messages": [], "temperature": "hot", "n": "many"},
            "`temperature` should be a number. `n` should be an integer.",
            "temperature",
        ),
        (
            {"temperature": "hot", "n": 1.5, "stream": "perhaps", "stop": 5},
            "`messages` is missing. `temperature` should be a number. `n` should be an integer. Others do not fit, either.",
            "messages",
        ),
    ],
)  # fmt: skip
def test_the_field_and_what_it_should_be(body: Any, text: str, field: str | None) -> None:
    assert explained(body) == (text, field)


class Wrapped(BaseModel):
    """As vLLM's classes: pydantic calls all of them by the validator that is around them."""

    @model_validator(mode="wrap")
    @classmethod
    def noted(cls, data: Any, handler: Any) -> Any:
        return handler(data)


class OfSchema(Wrapped):
    type: Literal["schema", "text"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OfTags(Wrapped):
    type: Literal["tags"]
    tags: list[str]


class OfEnds(Wrapped):
    type: Literal["tags"]
    ends: list[str]


class Wish(BaseModel):
    form: OfSchema | OfTags | OfEnds


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"type": "schema", "schema": True}, "`form.schema` should be an object."),
        ({"type": "other"}, "`form.type` should be 'schema' or 'text' or 'tags'."),
    ],
)
def test_forms_that_pydantic_gives_one_name_are_told_apart_by_what_the_body_has(
    form: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        Wish.model_validate({"form": form})
    assert explain(raised.value.errors())[0] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "tool", "words"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["messages", "role", "content", "type", "text", "stop", "bias", "n"]), inner),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.text("#%&", min_size=3))
def test_whatever_does_not_fit_is_explained_without_quoting_it(body: Any, secret: str) -> None:
    hidden = {"messages": [user(body), secret, {"role": secret}], "n": secret}
    for value in (body, hidden):
        try:
            Call.model_validate(value)
        except ValidationError as error:
            text, field = explain(error.errors())
            assert text.endswith(".")
            assert "pydantic" not in text and secret not in text
            assert field is None or f"`{field}`" in text
