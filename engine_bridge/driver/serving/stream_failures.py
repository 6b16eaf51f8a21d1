"""Errors that end a stream, as exceptions that vLLM's serving classes can handle."""

from __future__ import annotations

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.driver.vllm_api import RetryableRequestError, VLLMClientError
from engine_bridge.protocol.errors import AdapterChanging, InvalidRequest

# The loader's other error codes mean that an adapter's files have changed since it was registered, or cannot be read now.
_DOES_NOT_PASS = ("not_finite", "too_large", "not_ready", "gone")

ENGINE_FAILED_MESSAGE = (
    "The engine failed while it worked on this request and is being rebuilt. Send the request again."
)


class UnfitAdapter(InvalidRequest, VLLMClientError):
    """The adapter that a request names cannot be computed with: a bad request for us as for vLLM's serving classes, never worth a retry."""


class ChangingAdapter(AdapterChanging, RetryableRequestError):
    """The adapter's files are being replaced: for us as for vLLM's serving classes the request is worth another try."""


def engine_failed() -> Exception:
    """Return the error for answers that the engine's failure ended: it asks the client to try again."""
    return RetryableRequestError(ENGINE_FAILED_MESSAGE)


def ended(why: str) -> Exception:
    """Return the error for answers that were ended on purpose: it asks the client to try again. why: a sentence."""
    return RetryableRequestError(f"{why} Send the request again.")


def lost() -> Exception:
    """Return the error for an answer of which an output could not be read."""
    return RetryableRequestError("A part of this answer was lost on the server. Send the request again.")


def given_up(error: Exception) -> Exception:
    """Return the error for a request that the engine gave up: the caller may try again, unless its adapter's own numbers are at fault."""
    if isinstance(error, AdapterRejected) and error.code == "not_finite":
        return UnfitAdapter(f"{error} Mend the adapter or ask for another.", param="model")
    if is_changing(error):
        return ChangingAdapter()
    return RetryableRequestError(f"{error} Send the request again.")


def is_changing(error: Exception) -> bool:
    """Return whether an adapter could not be loaded for a reason that passes: its next version comes, or its files can be read again."""
    return isinstance(error, AdapterRejected) and error.code not in _DOES_NOT_PASS
