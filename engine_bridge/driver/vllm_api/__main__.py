"""`python -m engine_bridge.driver.vllm_api`: prints, as JSON for `overture doctor`, which names of vLLM's that we use have moved.

With `--model` a second line says what the model of the settings on stdin cannot have: one process imports vLLM for both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_bridge.driver.vllm_api.check import Finding, check
from engine_bridge.driver.vllm_api.features import FEATURES, Feature
from engine_bridge.driver.vllm_api.inventory import ALL
from engine_bridge.process_end import leave, stop_collecting

EXIT_MOVED = 1


def main(arguments: list[str]) -> int:
    """Print a report of each feature; returns EXIT_MOVED if a name has moved, else 0."""
    parser = argparse.ArgumentParser(prog="python -m engine_bridge.driver.vllm_api", description=__doc__)
    parser.add_argument("--source", type=Path, metavar="PLACE", help="import vLLM from this folder or wheel")
    parser.add_argument("--model", action="store_true", help="read an engine's settings as JSON from stdin")
    options = parser.parse_args(arguments)
    if options.model:
        from engine_bridge.driver.engine import model_facts

        config = model_facts.prepare(sys.stdin.buffer.read())
    with tempfile.TemporaryDirectory(prefix="overture-vllm-") as scratch:
        if options.source is not None:
            folder = _folder_of(options.source, Path(scratch))
            if folder is None:
                parser.error(f"there is no vllm/__init__.py in {options.source}")
            sys.path.insert(0, str(folder))
        findings = check(ALL)
    # At once: what follows may end the process.
    print(json.dumps([_report(feature, findings) for feature in FEATURES]), flush=True)
    if options.model:
        print(json.dumps(model_facts.told(config)))
    return EXIT_MOVED if findings else 0


def _folder_of(place: Path, scratch: Path) -> Path | None:
    """Return the folder that holds the package's folder; None if there is none. A wheel is unpacked, without its compiled libraries."""
    if place.is_file() and zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as wheel:
            wheel.extractall(scratch, [name for name in wheel.namelist() if not name.endswith(".so")])
        place = scratch
    folders = (place, place.parent) if place.name == "vllm" else (place,)
    return next((folder for folder in folders if (folder / "vllm" / "__init__.py").is_file()), None)


def _report(feature: Feature, findings: list[Finding]) -> dict[str, Any]:
    return {
        "feature": feature.name,
        "num_names": len(set(_names(feature))),
        "moved": [
            {"name": each.where, "problem": each.problem} for each in findings if each.feature == feature
        ],
        "without": feature.without,
        "device": feature.device,
        "is_vital": feature.is_vital,
        "at_start": feature.at_start,
    }


def _names(feature: Feature) -> Iterator[tuple[str, str]]:
    """Yield the names that a feature depends on; an owner without uses counts as one."""
    for owner in ALL:
        yield from ((owner.path, use.name) for use in owner.uses if use.feature == feature)
        if not owner.uses and owner.feature == feature:
            yield owner.path, ""


if __name__ == "__main__":
    stop_collecting()
    leave(main(sys.argv[1:]))
