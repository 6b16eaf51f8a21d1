import pytest

from engine_bridge.protocol.api_errors import MAX_MESSAGE_CHARS, anthropic_type, error_body
from gateway.errors import GatewayError, to_frame, to_openai_body


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
    assert error == {"type": expected[0], "code": expected[1], "param": "n", "message": "No."}


def test_anthropics_types_tell_whose_fault_it_is() -> None:
    found = [anthropic_type(status) for status in (404, 405, 408, 415, 500, 503)]
    assert found == ["not_found_error", *["invalid_request_error"] * 3, "api_error", "overloaded_error"]


def test_a_message_that_quotes_what_a_client_has_sent_is_no_longer_than_a_person_reads() -> None:
    long = f"`n` must be an integer. (value={'x' * 1_000_000})"
    message = error_body(400, long)["error"]["message"]
    assert message.startswith("`n` must be an integer.") and len(message) == MAX_MESSAGE_CHARS + 1
    assert error_body(400, "x" * MAX_MESSAGE_CHARS)["error"]["message"] == "x" * MAX_MESSAGE_CHARS
    cut_off = "x" * MAX_MESSAGE_CHARS + " is longer than the maximum model length"
    for message in ("This model's maximum context length is 4096 tokens.", cut_off):
        assert error_body(400, message)["error"]["code"] == "context_length_exceeded"
    refused = GatewayError("bad_request", long)
    assert len(to_openai_body(refused)["error"]["message"]) == MAX_MESSAGE_CHARS + 1
    assert len(to_frame(refused)["message"]) == MAX_MESSAGE_CHARS + 1
