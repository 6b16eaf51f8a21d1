"""Pictures that were read for a prompt which the engine never got.

vLLM's renderer remembers which pictures the engine has, and sends those by name alone. It counts a picture as sent once it is read, but the
prompt may still be refused (too long), cancelled, or rendered for its length only; the next request with that picture fails then. Here engine and
renderer are one process, so a picture that is sent with each request costs nothing: the renderer keeps what it has read, and sends it always.
Source: vLLM 0.32, `renderers/base.py` and `multimodal/cache/base.py`.
"""

from __future__ import annotations

from typing import Any


def install(engine: Any) -> None:
    """Have an engine's renderer send pictures whole."""
    renderer = engine.renderer
    renderer._mm_processor_cache = renderer._mm_processor_only_cache
