"""`promptfoo eval`, the command: providers for chat completions, responses, messages and completions, each judged by assertions.

The assertions are part of each call: `eval` ends with status 100 where one of them fails.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path

from harness import (
    BASE_URL,
    MODEL,
    QUESTION,
    V1_URL,
    WEATHER_SCHEMA,
    WEATHER_TOOL,
    call,
    call_all,
    empty_home,
    run_command,
)

# Nothing is asked for or told outside this machine: no telemetry, no news of updates, no sharing, no generation elsewhere.
SWITCHED_OFF = {
    f"PROMPTFOO_DISABLE_{what}": "1"
    for what in "TELEMETRY UPDATE SHARING REMOTE_GENERATION REDTEAM_REMOTE_GENERATION".split()
}
ASSERTION_FAILED, FAILED_STATUS = 1, 100
NOT_ANSWERED = 2
TALK = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello! My name is {{name}}."},
    {"role": "assistant", "content": "Hello {{name}}!"},
    {"role": "user", "content": "What is my name?"},
]
NAMES = [{"name": name} for name in ("Ada", "Grace")]
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "strict": True, "schema": WEATHER_SCHEMA},
}
# The demo model cannot judge: only the reason is left to it.
REASON = {"type": "string", "minLength": 1, "maxLength": 40}
VERDICT = {
    "type": "object",
    "properties": {"reason": REASON, "pass": {"const": True}, "score": {"const": 1}},
    "required": ["reason", "pass", "score"],
    "additionalProperties": False,
}
# What the generic HTTP provider is told to make of server-sent events.
JOINED = """(json, text) => text.split("\\n").filter((line) => line.startsWith("data: {"))
  .map((line) => JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "").join("")"""


def provider(kind, model=MODEL, base_url=V1_URL, **settings):
    config = {"apiBaseUrl": base_url, "apiKey": "none", "max_tokens": 32, "temperature": 0} | settings
    return {"id": f"{kind}:{model}", "label": f"{kind} {model}", "config": config}


def evaluate(providers, prompt, asserts=(), variables=({},), *, status=0, more=()):
    """The results of `promptfoo eval`: one for each provider and each set of variables."""
    config = {
        "description": "Overture",
        "prompts": [prompt if isinstance(prompt, str) else json.dumps(prompt)],
        "providers": providers,
        "defaultTest": {"assert": list(asserts)},
        "tests": [{"vars": dict(values)} for values in variables],
    }
    Path("promptfooconfig.yaml").write_text(json.dumps(config))  # JSON is YAML
    Path("results.json").unlink(missing_ok=True)
    options = ("--no-cache", "--no-table", "--no-progress-bar", "--no-share", "--output=results.json")
    run_command("promptfoo", "eval", *options, *more, status=status)
    results = json.loads(Path("results.json").read_text())["results"]["results"]
    assert len(results) == len(providers) * len(variables), results
    assert all(result["success"] is (status == 0) for result in results), results
    return results


def check_usage(results):
    """Each answer was asked for now, and says how many tokens it took."""
    for result in results:
        usage = result["response"]["tokenUsage"]
        assert not result["response"].get("cached") and usage["prompt"] > 0 < usage["completion"], usage
        assert usage["total"] == usage["prompt"] + usage["completion"], usage


def chat_completions():
    asserts = [
        {"type": "regex", "value": "[A-Za-z]{2,}"},
        {"type": "not-contains", "value": "<|"},
        {"type": "finish-reason", "value": "stop"},
        {"type": "latency", "threshold": 60_000},
    ]
    check_usage(evaluate([provider("openai:chat")], "Hello!", asserts))


def says_the_name(kind, **settings):
    """Several turns, with variables in them."""
    asserts = [{"type": "contains", "value": "{{name}}"}]
    check_usage(evaluate([provider(kind, **settings)], TALK, asserts, NAMES))


def adapters_beside_their_model():
    providers = [provider("openai:chat", name) for name in (MODEL, "json", "shout")]
    answers = [result["response"]["output"] for result in evaluate(providers, TALK, (), NAMES[:1])]
    assert len({str(answer) for answer in answers}) == 3, answers


def repeated_without_a_cache():
    results = evaluate(
        [provider("openai:chat")], TALK, variables=[{"name": f"Ada {n}"} for n in range(8)], more=["-j", "8"]
    )
    check_usage(results)


def structured_output():
    asserts = [{"type": "is-json", "value": WEATHER_SCHEMA}]
    evaluate([provider("openai:chat", response_format=SCHEMA_FORMAT, max_tokens=64)], QUESTION, asserts)


def tool_calls():
    asserts = [{"type": "is-valid-openai-tools-call"}]
    settings = {"tools": [WEATHER_TOOL], "tool_choice": "required", "max_tokens": 64}
    [result] = evaluate([provider("openai:chat", **settings)], QUESTION, asserts)
    [made] = result["response"]["output"]
    assert made["function"]["name"] == "get_weather", made


def perplexity():
    asserts = [{"type": "perplexity", "threshold": 1000}]
    [result] = evaluate([provider("openai:chat", passthrough={"logprobs": True})], "Hello!", asserts)
    log_probs = result["response"]["logProbs"]
    assert log_probs and all(math.isfinite(value) and value <= 0 for value in log_probs), log_probs


def a_judge():
    verdict = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": VERDICT}}
    judge = provider("openai:chat", response_format=verdict, max_tokens=128)
    asserts = [{"type": "llm-rubric", "value": "It is polite.", "provider": judge}]
    [result] = evaluate([provider("openai:chat")], "Hello!", asserts)
    [graded] = result["gradingResult"]["componentResults"]
    assert graded["score"] == 1 and 0 < len(graded["reason"]) <= 40, graded
    assert graded["tokensUsed"]["completion"] > 0, graded


def responses_with_structured_output():
    asserts = [{"type": "is-json", "value": WEATHER_SCHEMA}]
    form = {"type": "json_schema", "name": "weather", "strict": True, "schema": WEATHER_SCHEMA}
    settings = {"max_output_tokens": 64, "response_format": form}
    evaluate([provider("openai:responses", **settings)], QUESTION, asserts)


def text_completions():
    asserts = [{"type": "regex", "value": "\\S"}]
    check_usage(evaluate([provider("openai:completion")], "Hello! My name is", asserts))


def chat_completions_streamed_over_http():
    messages = [{"role": "user", "content": "{{prompt}}"}]
    config = {
        "url": f"{V1_URL}/chat/completions",
        "method": "POST",
        "headers": {"Content-Type": "application/json"},
        "body": {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 32},
        "transformResponse": JOINED,
    }
    evaluate(
        [{"id": "http", "label": "http", "config": config}],
        "Hello!",
        [{"type": "regex", "value": "[A-Za-z]{2,}"}],
    )


def an_assertion_that_fails():
    asserts = [{"type": "contains", "value": "no answer has these words"}]
    [result] = evaluate([provider("openai:chat")], "Hello!", asserts, status=FAILED_STATUS)
    assert result["failureReason"] == ASSERTION_FAILED and result["response"]["output"], result


def a_prompt_that_is_too_long():
    [result] = evaluate([provider("openai:chat")], "word " * 6000, status=FAILED_STATUS)
    assert result["failureReason"] == NOT_ANSWERED and "maximum context length" in result["error"], result


if __name__ == "__main__":
    with empty_home() as home:
        os.environ |= SWITCHED_OFF | {"PROMPTFOO_CONFIG_DIR": str(home / ".promptfoo")}
        call_all()
        for name, kind, settings in (
            ("chat completions of several turns", "openai:chat", {}),
            ("responses", "openai:responses", {"max_output_tokens": 32, "store": False}),
            ("responses streamed", "openai:responses", {"max_output_tokens": 32, "stream": True}),
            ("messages", "anthropic:messages", {"base_url": BASE_URL}),
            ("messages streamed", "anthropic:messages", {"base_url": BASE_URL, "stream": True}),
        ):
            call(name, partial(says_the_name, kind, **settings))
