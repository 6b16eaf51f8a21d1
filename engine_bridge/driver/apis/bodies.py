"""Bodies of API calls on their way in, checked by vLLM's own request classes, and errors on their way out, in each API's shape."""

from __future__ import annotations

import json
import logging
import traceback
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from engine_bridge.calls.pictures import where
from engine_bridge.driver.apis.failures import (
    CANNOT_CONTINUE,
    TOO_LATE,
    as_template_failure,
    cannot_continue,
    is_clients,
    log_once,
    noted,
    unfit,
)
from engine_bridge.driver.apis.media import PICTURE_MESSAGE, is_of_a_picture
from engine_bridge.driver.apis.suspects import MALFORMED_MESSAGE, suspect_of
from engine_bridge.driver.vllm_api import (
    ErrorResponse,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMServerError,
    create_error_response,
    translate_error_response,
)
from engine_bridge.protocol.api_errors import UNKNOWN_MODEL, anthropic_type, cut, error_body
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.node import JsonReply

log = logging.getLogger(__name__)

# Fields that steer scheduling and KV transfer inside the server: the gateway sets them, never a client. A `priority` that the gateway lets a client
# have comes with the caller.
SERVER_FIELDS = ("priority", "session_id", "kv_transfer_params", "ec_transfer_params", "vllm_xargs")
# Errors whose fault is known, whatever the body says: the server's, or a refusal on purpose.
_OURS = (EngineUnavailable, InvalidRequest, VLLMServerError, GracefulHTTPError, OSError, MemoryError)
# Python's text where the system gives a process no more threads.
NO_THREAD = "can't start new thread"
# Errors of code that did not expect a value; vLLM answers some of them as 400, with Python's own text.
_MISTAKES = (TypeError, ArithmeticError, AttributeError, LookupError, RecursionError)
# How errors begin that vLLM's generators of chat and text completions write themselves.
ERROR_EVENT = 'data: {"error":'
ANTHROPIC_ERROR_EVENT = "event: error\n"
_ANTHROPIC_INTERNAL = '"internal_error"'


class Rejected(Exception):
    """A body that is refused, with the reply that says why."""

    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.error.message)
        self.response = response


def parse(request_class: Any, body: Any) -> Any:
    """Return a pydantic request made from a JSON value. Raises Rejected, which says what does not fit."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in SERVER_FIELDS}
    try:
        return request_class.model_validate(body)
    except ValidationError as error:
        raise Rejected(as_error_response(unfit(error))) from error
    except Exception as error:
        # Pydantic passes on errors of vLLM's validators, raised on purpose or by mistake.
        raise Rejected(as_malformed(error)) from error


def as_malformed(error: Exception) -> ErrorResponse:
    """Return the reply to a body whose validation or rendering failed before the engine saw any of it.

    The fault is the client's, unless it is known to be ours. vLLM's validators take a field's form for granted here and there and fail on another
    (AttributeError, KeyError, RecursionError …). Such an error's text says nothing to a client, and may hold a piece of the body.
    """
    if isinstance(error, _OURS):
        return as_error_response(error)
    response = create_error_response(error)
    is_on_purpose = response.error.code < 500 and not isinstance(error, _MISTAKES)
    if not is_on_purpose and not isinstance(error, NotImplementedError):
        # Only its class and place are logged: its text may quote the body.
        log.info("a body could not be used: %s in %s", type(error).__name__, _place(error))
        response.error.message = MALFORMED_MESSAGE
    if response.error.code >= 500:
        response.error.code, response.error.type = 400, "BadRequestError"
    return response


def as_unusable(error: Exception, body: Any) -> ErrorResponse:
    """Return the reply to a call that failed after its body was found to have the right form, and before the engine saw any of it.

    A few fields hold whatever JSON a client likes (schemas, arguments of the template, parts of messages), and code fails on unexpected values in
    them. If a body has none of these fields, the failure is the server's fault.
    """
    if isinstance(error, ValidationError):  # an error of a request that vLLM makes of the client's request
        return as_error_response(unfit(error))
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        log.error("no thread or process could be started: raise their limit (ulimit -u, --pids-limit)")
        error = EngineUnavailable("The server can start no more work now. Try again in a moment.")
    if cannot_continue(error):
        return as_error_response(InvalidRequest(CANNOT_CONTINUE, param="messages"))
    if isinstance(error, _OURS) or is_clients(error):
        response = as_error_response(error)
        if isinstance(error, NotImplementedError):
            response.error.code, response.error.type = 400, "BadRequestError"
        return response
    if is_of_a_picture(error):
        log.info("a picture could not be read: %s in %s", type(error).__name__, _place(error))
        return as_error_response(InvalidRequest(PICTURE_MESSAGE, param=where(body)))
    suspect = suspect_of(body)
    if suspect is None:
        return as_error_response(as_template_failure(error) or error)
    log.info("a body could not be used, which is taken to be its own fault", exc_info=error)
    return create_error_response(suspect.message, param=suspect.param)


def _place(error: Exception) -> str:
    """Return the name of the function in which an error was raised, for the log: it names no value."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_qualname


def as_error_response(error: Exception) -> ErrorResponse:
    """Return an error in the shape of OpenAI's API. An unknown error becomes an internal error."""
    if isinstance(error, EngineUnavailable):
        return create_error_response(RetryableRequestError(str(error)))
    if isinstance(error, TimeoutError):
        return create_error_response(RetryableRequestError(TOO_LATE))
    if isinstance(error, InvalidRequest):
        return create_error_response(str(error), param=error.param)
    if isinstance(error, RetryableRequestError | GracefulHTTPError) or is_clients(error):
        return create_error_response(error)
    return create_error_response(
        noted(error), err_type="InternalServerError", status_code=HTTPStatus.INTERNAL_SERVER_ERROR
    )


def classified(message: str | Exception, *args: Any, **options: Any) -> ErrorResponse:
    """Return an error's reply, in the place of `create_error_response` of vLLM's serving classes, which would tell a client any exception's text."""
    return (
        as_error_response(message)
        if isinstance(message, Exception)
        else create_error_response(message, *args, **options)
    )


def tell_no_insides(*serving: Any) -> None:
    """Make vLLM's serving classes, which turn an error that breaks a stream into an event of it, tell no more than `as_error_response`."""
    log_once()
    for each in serving:
        each.create_error_response = classified


def without_insides(event: str) -> str:
    """Return an error event of vLLM's generator of Anthropic's events without the text of an internal error. vLLM has logged it."""
    if _ANTHROPIC_INTERNAL not in event:
        return event
    error = {"type": "api_error", "message": "The server failed on this request."}
    return f"{ANTHROPIC_ERROR_EVENT}data: {json.dumps({'type': 'error', 'error': error})}\n\n"


def error_reply(response: ErrorResponse, *, is_anthropic: bool) -> JsonReply:
    """Return an error's reply in the form of its API."""
    if is_anthropic:
        response.error.message = cut(response.error.message)
        response.error.type = anthropic_type(response.error.code)
        return JsonReply(response.error.code, bytes(translate_error_response(response).body))
    return openai_error(response)


def openai_error(response: ErrorResponse, code: str = "") -> JsonReply:
    """Return an error of vLLM's in the form that all errors of this server have. code: a more exact code than the status."""
    error = response.error
    if not code and error.code == 404 and error.param == "model":
        code = UNKNOWN_MODEL
    body = error_body(error.code, error.message, param=error.param, code=code)
    return JsonReply(error.code, json.dumps(body).encode())


def in_our_form(event: str) -> str:
    """Rewrite an error that a generator of vLLM's has written into its stream, as `openai_error` would write it."""
    response = ErrorResponse.model_validate_json(event.removeprefix("data: "))
    return f"data: {openai_error(response).body.decode()}\n\n"
