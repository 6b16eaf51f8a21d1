"""Thoughts that clients carry from one response to the next, where nothing is stored. Pure.

Source: OpenAI's "Reasoning models", "Encrypted reasoning items". OpenAI's server hides its thoughts from those who carry them; here they stand in the
response, too. But Codex and the AI SDK give back what is opaque to them and leave out a thought that they could read.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

ASKED = "reasoning.encrypted_content"
"""What a client's `include` has, so that its thoughts are told in this form."""
_MARK = "overture-thought."


def packed(thought: str) -> str:
    """Return a thought as a client carries it."""
    return _MARK + base64.urlsafe_b64encode(thought.encode("utf-8", "replace")).decode()


def unpacked(carried: Any) -> str:
    """Return the thought that a client has carried; "" for anything else, as what another server has encrypted."""
    if not isinstance(carried, str) or not carried.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(carried.removeprefix(_MARK), altchars="-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
