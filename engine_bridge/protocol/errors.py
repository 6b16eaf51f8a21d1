"""Errors between the gateway and an engine, in terms of neither HTTP nor websockets.

The gateway maps these to statuses, bodies and close codes (`gateway/errors.py`). Messages are safe to show to a client: no paths,
no stack traces; causes are chained and go to the log.
"""

ADAPTER_CHANGING_CODE = "adapter_changing"
# vLLM hands on no more of an error than its text, by which the code is found again.
ADAPTER_CHANGING = (
    "The files of this adapter are being replaced, or cannot be read now. Send the request again."
)
ASLEEP = "The engine sleeps. Its operator can wake it up (POST /wake_up)."


class BridgeError(Exception):
    """Base of all errors that a node raises on purpose."""


class InvalidRequest(BridgeError):
    """The request can never work as it is.

    Attributes:
        param: the field at fault, or None.
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "bad_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineUnavailable(BridgeError):
    """The node takes no requests now: it is starting, being rebuilt, draining or closed. Worth another try later.

    Attributes:
        code: `starting`, `engine_failed`, `draining`, `asleep`, `busy` or `adapter_changing`.
    """

    def __init__(self, message: str, *, code: str = "engine_failed") -> None:
        super().__init__(message)
        self.code = code


class AdapterChanging(EngineUnavailable):
    """The files of a request's adapter are being replaced, and for long: no version of it can be computed with now."""

    def __init__(self) -> None:
        super().__init__(ADAPTER_CHANGING, code=ADAPTER_CHANGING_CODE)


class TooBusy(BridgeError):
    """This tenant has enough work waiting, so more is refused; other tenants are served.

    Attributes:
        retry_after_s: the estimated time until there will be room, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotSupported(BridgeError):
    """This node does not offer the operation (a capability that depends on version, platform or configuration)."""

    code = "not_supported"


class InternalFailure(BridgeError):
    """The node itself has failed on this request. The cause is in its log, under the number that the text names."""


class SeamMoved(RuntimeError):
    """A name or signature of vLLM that the driver stands on has changed. Raised at start-up, never in the middle of work."""


class ClusterError(Exception):
    """Nodes cannot be placed, or do not trust each other. The text tells operators the cause and the remedy."""
