"""Why an adapter was turned away, and what went wrong with the registry. Messages name no paths: they may be shown to a client."""

from __future__ import annotations

from typing import Final, Literal, get_args

from engine_bridge.protocol.errors import BridgeError, NotSupported

RejectCode = Literal[
    "bad_name",
    "name_taken",  # by the model, or by an adapter from elsewhere that the folder's must not replace
    "adapter_not_found",  # no such folder, or no adapter_config.json in it
    "unreadable",  # it is there, but the system does not let us read it
    "bad_config",
    "unsupported_option",
    "unsupported_format",  # weights, but not as safetensors
    "rank_too_large",
    "too_large",  # for the host memory that adapters may take
    "no_weights",
    "corrupt_file",
    "unexpected_tensor",  # no LoRA weight, or the same one a second time
    "unknown_module",
    "missing_tensor",  # lora_A without lora_B, or the reverse
    "wrong_shape",
    "wrong_dtype",
    "not_finite",
    "not_ready",  # it was sound, and could not be laid out: the log says why
    "gone",  # the version that a request was let in with is served no more
    "changed",  # the files have changed since the inspection: worth another try
]
# Codes of faults that stay while files and name are the same. The others may pass: a full disk, a file that may not be read yet, files that change,
# too many open files, a database in use, a node that is away.
_PASSING: Final = frozenset(("name_taken", "unreadable", "not_ready", "gone", "changed"))
FINAL_CODES: Final = frozenset[str]((*get_args(RejectCode), "not_supported")) - _PASSING
RegistryCode = Literal["disk_full", "busy", "closed", "registry_failed"]

MAX_QUOTED_CHARS: Final = 100  # Chosen: enough to recognise a tensor's name; a hostile file fills no log.


class AdapterRejected(BridgeError):
    """The adapter cannot be served as its files are now. The message names the fault and, if known, the remedy.

    Attributes:
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, *, code: RejectCode) -> None:
        super().__init__(message)
        self.code: RejectCode = code


class RegistryFailed(BridgeError):
    """The registry's database refused a call; nothing was changed. The cause is chained.

    Attributes:
        code: `disk_full`, `busy` (another program holds the file), `closed` or `registry_failed`.
    """

    def __init__(self, message: str, *, code: RegistryCode) -> None:
        super().__init__(message)
        self.code: RegistryCode = code


def status_of(error: AdapterRejected | RegistryFailed | NotSupported) -> tuple[int, str]:
    """Return the HTTP status and the code for a client."""
    if isinstance(error, RegistryFailed):
        return 503, "storage_failed"
    if isinstance(error, NotSupported):
        return 400, error.code
    return (404 if error.code == "adapter_not_found" else 400), error.code


def quoted(value: object) -> str:
    """Quote a value from a file or a client for a message: one line, control characters escaped, about 100 characters at most."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = repr(value[:MAX_QUOTED_CHARS] if isinstance(value, str) else value)
    is_cut = len(text) > MAX_QUOTED_CHARS or (isinstance(value, str) and len(value) > MAX_QUOTED_CHARS)
    return text[: MAX_QUOTED_CHARS - 1] + "…" if is_cut else text
