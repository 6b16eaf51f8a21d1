"""The one form of errors over HTTP."""

from __future__ import annotations

import pytest

from engine_bridge.protocol.api_errors import error_body, unknown_model


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "", ("invalid_request_error", "bad_request")),
        (404, "unknown_model", ("invalid_request_error", "model_not_found")),
        (404, "adapter_not_found", ("invalid_request_error", "adapter_not_found")),
        (418, "", ("invalid_request_error", "bad_request")),
        (500, "", ("server_error", "internal")),
        (503, "", ("server_error", "engine_failed")),
        (599, "", ("server_error", "internal")),
    ],
)
def test_type_and_code_are_words(status: int, code: str, expected: tuple[str, str]) -> None:
    error = error_body(status, "No.", param="n", code=code)["error"]
    assert (error["type"], error["code"], error["param"], error["message"]) == (*expected, "n", "No.")


def test_a_prompt_that_does_not_fit_is_told_from_other_mistakes() -> None:
    error = error_body(400, "This model's maximum context length is 4096 tokens.")["error"]
    assert error["code"] == "context_length_exceeded"


def test_an_unknown_model_lists_what_there_is_and_no_more_than_a_screen() -> None:
    assert unknown_model("x", ["base", "ada"]) == "The model `x` does not exist. This server has: base, ada."
    long = unknown_model("x" * 5000, [f"adapter-{n}" for n in range(500)])
    assert "and 480 more" in long and len(long) < 1000
