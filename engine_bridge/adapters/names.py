"""The check of adapters' names, one for every door that a name comes through."""

from __future__ import annotations

import unicodedata
from typing import Final

from engine_bridge.adapters.errors import AdapterRejected, quoted

MAX_NAME_CHARS: Final = 200  # Chosen: names are shown in lists, typed in requests, and stored with each turn.


def problem_of(name: str) -> str:
    """Return the fault of a name, as the end of a sentence; "" for none.

    Names stand in lists, in logs, in JSON, in addresses (`/v1/adapters/NAME/pin`) and in stored conversations, and people type them.
    """
    # An address loses such parts on its way here.
    if any(not part or part.startswith(".") for part in name.split("/")) and name:
        return "begins with a dot or a slash, ends with a slash, or has a part between slashes that is empty or begins with a dot"
    return problem_as_text(name)


def problem_as_text(name: str) -> str:
    """Return the fault of a name that is only shown and compared, such as the model's own, which may be a path."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"is longer than {MAX_NAME_CHARS} characters"
    if not name.isprintable():
        return "holds a line break or another character that cannot be shown"
    if name != name.strip():
        return "begins or ends with a space"
    if not unicodedata.is_normalized("NFC", name):
        return "is not in Unicode's normal form C: its accents are characters of their own"
    return ""


def check_name(name: str) -> None:
    """Raise AdapterRejected (`bad_name`) for a name that no adapter may have."""
    problem = problem_of(name)
    if problem:
        raise AdapterRejected(
            f"No adapter may be called {quoted(name)}: the name {problem}.", code="bad_name"
        )
