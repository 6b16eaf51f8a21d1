"""What an error of vLLM's says, for a log and for an operator."""

from __future__ import annotations

import traceback
from pathlib import Path


def said_by(error: Exception) -> str:
    """Return an error's type and text; of one without a text the line that raised it, and where that stands."""
    text = str(error)
    if not text and (lines := traceback.extract_tb(error.__traceback__)):
        text = f"{lines[-1].line} ({Path(lines[-1].filename).name}:{lines[-1].lineno})"
    return f"{type(error).__name__}: {text}"
