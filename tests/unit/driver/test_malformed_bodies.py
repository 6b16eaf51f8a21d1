"""Whose fault it is when a body cannot be used, told by the error alone."""

from __future__ import annotations

import pytest
from vllm.exceptions import RetryableRequestError, VLLMServerError, VLLMValidationError

from engine_bridge.driver.bodies import MALFORMED_MESSAGE, as_malformed
from engine_bridge.errors import EngineUnavailable, InvalidRequest


def raised(error: Exception) -> Exception:
    """As it is caught: with the place where it was raised."""
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [AttributeError("a secret"), KeyError("a secret"), TypeError("a secret"), RecursionError("a secret")],
)
def test_code_that_trips_over_a_body_blames_the_body_and_quotes_none_of_it(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "engine_bridge")
    response = as_malformed(raised(error))
    assert (response.error.code, response.error.message) == (400, MALFORMED_MESSAGE)
    assert type(error).__name__ in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("too many choices", param="n"), VLLMValidationError("too many choices", parameter="n")],
)
def test_what_is_refused_on_purpose_keeps_its_words(error: Exception) -> None:
    response = as_malformed(raised(error))
    assert response.error.code == 400 and response.error.param == "n"
    assert "too many choices" in response.error.message


def test_what_is_not_offered_is_no_failure_of_the_server() -> None:
    response = as_malformed(raised(NotImplementedError("no beams here")))
    assert (response.error.code, response.error.message) == (400, "no beams here")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnavailable("starting"), 503),
        (RetryableRequestError("again"), 503),
        (VLLMServerError("broken"), 500),
        (OSError("disk full"), 500),
        (MemoryError(), 500),
    ],
)
def test_what_is_known_to_be_the_servers_stays_so(error: Exception, status: int) -> None:
    assert as_malformed(raised(error)).error.code == status
