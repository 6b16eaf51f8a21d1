"""`instructor`: answers as pydantic models, by tools (its default), by JSON and by schema."""

from __future__ import annotations

import instructor
import openai
from harness import KEY, MODEL, QUESTION, V1_URL, call, call_all
from weather import Weather

ASK = {
    "model": MODEL,
    "response_model": Weather,
    "max_tokens": 256,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_retries": 1,
}


def client(mode):
    return instructor.from_openai(openai.OpenAI(base_url=V1_URL, api_key=KEY, max_retries=0), mode=mode)


def by(mode):
    assert isinstance(client(mode).chat.completions.create(**ASK), Weather)


def default_mode():
    made = instructor.from_openai(openai.OpenAI(base_url=V1_URL, api_key=KEY))
    assert isinstance(made.chat.completions.create(**ASK), Weather)


def create_with_completion():
    weather, raw = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_with_completion(**ASK)
    assert isinstance(weather, Weather) and raw.usage.completion_tokens > 0


def create_partial():
    parts = list(client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(**ASK))
    assert parts[-1].city is not None


if __name__ == "__main__":
    call_all()
    call("TOOLS", lambda: by(instructor.Mode.TOOLS))
    call("JSON_SCHEMA", lambda: by(instructor.Mode.JSON_SCHEMA))
