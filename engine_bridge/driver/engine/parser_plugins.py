"""Parsers of an operator's own: modules that register themselves with vLLM when they are imported."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)


def load_plugins(plugins: Iterable[str]) -> None:
    """Import plugins, by their modules' names or their files' paths; one that cannot be imported is left out, and the log says why."""
    for plugin in plugins:
        _load(plugin)


@cache
def _load(plugin: str) -> None:
    try:
        if not Path(plugin).is_file():
            importlib.import_module(plugin)
            return
        # Under a name of its own: a file that is called as a library is, such as regex.py, must not stand in that one's place.
        spec = importlib.util.spec_from_file_location(f"overture_plugin_{Path(plugin).stem}", plugin)
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        log.warning(
            "the parsers of %s are not known here: it cannot be imported (%s)", plugin, error, exc_info=True
        )
