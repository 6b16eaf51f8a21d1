"""Decides whose fault an exception is, and what its client is told.

A client is blamed only for requests that are refused on purpose: by an error class that says so, or by a `raise` in vLLM's code that reads requests.
All other failures are the server's: each is logged with the place it came from, under a number that the client is told, too, and its text stays here.
"""

from __future__ import annotations

import dis
import logging
import traceback
import uuid
from collections.abc import Iterator

from jinja2 import TemplateError, UndefinedError
from pydantic import ValidationError

from engine_bridge.calls.invalid_fields import explain
from engine_bridge.driver.vllm_api import GracefulHTTPError, RetryableRequestError, VLLMClientError
from engine_bridge.protocol.api_errors import is_too_long
from engine_bridge.protocol.errors import (
    BridgeError,
    EngineUnavailable,
    InternalFailure,
    InvalidRequest,
    TooBusy,
)

log = logging.getLogger(__name__)

CANNOT_CONTINUE = (
    "The chat template of this model leaves out a part of the last message, so no answer can go on from it. "
    "Leave that part out, or end with a message of the user's."
)
TEMPLATE_FAILED = (
    "The chat template of this model fails on this conversation{}. Leave out what is unusual in its messages and tools, "
    "or have the server's operator give a template that can write it (--chat-template)."
)
TOO_LATE = "Reading the prompt took too long. Send it again, or a shorter one."
RETRY_AFTER_S = 1.0
# Modules of vLLM's and of transformers that take requests apart, and Python's errors by which some of them still refuse a request.
_READERS = (
    "transformers.tokenization_",
    "transformers.utils.chat_template_utils",
    "vllm.entrypoints.",
    "vllm.renderers.",
    "vllm.inputs.",
    "vllm.multimodal.",
    "vllm.parser.",
    "vllm.reasoning.",
    "vllm.sampling_params",
    "vllm.tokenizers.",
    "vllm.tool_parsers.",
    "vllm.v1.engine.input_processor",
    "vllm.v1.structured_output.",
)
# vLLM's loggers that report each stream which ends early as an internal error, before they ask here what to tell its client.
_TWICE = ("vllm.entrypoints.openai.chat_completion.serving", "vllm.entrypoints.openai.completion.serving")
# What Jinja calls the file of a template that comes as a text.
_TEMPLATES = ("<template>", "<unknown>")
_REFUSALS = (ValueError, TypeError, OverflowError, NotImplementedError)


def is_clients(error: BaseException) -> bool:
    """Return whether a request was refused on purpose, so that the error's text is for the client."""
    if isinstance(error, InvalidRequest) or _is_said_by_a_template(error):
        return True
    if isinstance(error, VLLMClientError):
        # vLLM's renderers turn any error of a template or a tokenizer into such an error.
        return all(str(cause) not in str(error) or is_clients(cause) for cause in _causes(error))
    if isinstance(error, _REFUSALS):
        return _is_raised_by_a_reader(error) and all(is_clients(cause) for cause in _causes(error))
    return False


def _is_said_by_a_template(error: BaseException) -> bool:
    """Return whether a chat template, or Mistral's code in its place, refused a conversation.

    They do so by `raise_exception`, by their own errors or by an `assert`.
    """
    if type(error) is TemplateError or type(error).__module__ == "mistral_common.exceptions":
        return True
    return isinstance(error, AssertionError) and _place_of(error)[0].startswith("mistral_common.")


def cannot_continue(error: BaseException) -> bool:
    """Return whether the beginning of an answer, which a client gave, is missing in the text that the template rendered.

    The error's text quotes all of that text.
    """
    is_said = isinstance(error, ValueError) and "continue_final_message" in str(error)
    is_theirs = _place_of(error) == ("transformers.utils.chat_template_utils", "RAISE_VARARGS")
    return (is_said and is_theirs) or any(map(cannot_continue, _causes(error)))


def as_template_failure(error: BaseException) -> InvalidRequest | None:
    """Return what a client is told of an error that a chat template has raised by mistake, None for another one. The error is logged.

    Templates take fields of a conversation for granted: of a call, of a tool, a question behind each answer. Only Jinja's own error is quoted, which
    says the name of such a field.
    """
    found: BaseException | None = error
    while found is not None and not _is_raised_in_a_template(found):
        found = next(_causes(found), None)
    if found is None:
        return None
    log.warning("the chat template failed on a conversation", exc_info=error)
    reason = f": {found}" if isinstance(found, UndefinedError) else ""
    return InvalidRequest(TEMPLATE_FAILED.format(reason), param="messages")


def _is_raised_in_a_template(error: BaseException) -> bool:
    names = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, UndefinedError) or any(name in _TEMPLATES for name in names)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error's cause, if its maker says so."""
    if error.__cause__ is not None and not isinstance(error.__cause__, ValidationError):
        yield error.__cause__


def _is_raised_by_a_reader(error: BaseException) -> bool:
    """Return whether a `raise` of vLLM's reading code made the error, and not an operation that went wrong there."""
    module, operation = _place_of(error)
    return operation == "RAISE_VARARGS" and module.startswith(_READERS)


def _place_of(error: BaseException) -> tuple[str, str]:
    """Return the module and Python's operation that raised an error; empty for an error that was never raised."""
    trace = error.__traceback__
    if trace is None:
        return "", ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    operation = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return str(trace.tb_frame.f_globals.get("__name__", "")), operation


def as_bridge_error(error: Exception) -> BridgeError:
    """Return an exception that may leave the node. An exception that is not known to be a client's fault is logged."""
    if isinstance(error, BridgeError):
        return error
    if isinstance(error, ValidationError):
        return unfit(error)
    if isinstance(error, GracefulHTTPError):
        is_full = error.http_status == 429
        return TooBusy(str(error), retry_after_s=RETRY_AFTER_S) if is_full else EngineUnavailable(str(error))
    if isinstance(error, RetryableRequestError):
        return EngineUnavailable(str(error))
    if isinstance(error, TimeoutError):
        return EngineUnavailable(TOO_LATE)
    if is_clients(error):
        return too_long_or_invalid(str(error))
    return as_template_failure(error) or InternalFailure(noted(error))


def unfit(error: ValidationError) -> InvalidRequest:
    """Return an error that says in plain words what does not fit in a body."""
    message, field = explain(error.errors(include_url=False, include_context=False, include_input=False))
    return InvalidRequest(message, param=field)


def too_long_or_invalid(message: str) -> InvalidRequest:
    """Return a refusal in vLLM's words; a prompt that is too long has its own code."""
    if is_too_long(message):
        return InvalidRequest(f"{message} Start a new chat or shorten this one.", code="prompt_too_long")
    return InvalidRequest(message)


def noted(error: BaseException) -> str:
    """Log a failure of the server's, and return the text for its client."""
    number = uuid.uuid4().hex[:12]
    log.error("a request failed inside the server: failure %s", number, exc_info=error)
    return f"The server failed on this request. Its log says why, as failure {number}."


def log_once() -> None:
    """Make errors that end a stream be logged here alone, and only where they are the server's fault."""
    for name in _TWICE:
        logging.getLogger(name).addFilter(_is_nothing_raised)


def _is_nothing_raised(record: logging.LogRecord) -> bool:
    return not record.exc_info
