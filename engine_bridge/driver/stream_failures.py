"""What ends a stream, as exceptions that vLLM's serving classes know what to make of."""

from __future__ import annotations

from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.driver.vllm_api import RetryableRequestError, VLLMClientError
from engine_bridge.errors import InvalidRequest

ENGINE_FAILED_MESSAGE = (
    "The engine failed while it worked on this request and is being rebuilt. Send the request again."
)


class UnfitAdapter(InvalidRequest, VLLMClientError):
    """The adapter that a request names cannot be computed with: a bad request for us as for vLLM's serving classes, never worth a retry."""


def engine_failed() -> Exception:
    """The error for answers that the engine's failure ended: it asks the client to try again."""
    return RetryableRequestError(ENGINE_FAILED_MESSAGE)


def lost() -> Exception:
    """The error for an answer of which an output could not be read."""
    return RetryableRequestError("A part of this answer was lost on the server. Send the request again.")


def given_up(error: Exception) -> Exception:
    """The caller may try again, unless its adapter's own numbers are at fault."""
    if isinstance(error, AdapterRejected) and error.code == "not_finite":
        return UnfitAdapter(f"{error} Mend the adapter or ask for another.", param="model")
    return RetryableRequestError(f"{error} Send the request again.")
