"""`python -m engine_bridge.driver.vllm_api`: prints which names of vLLM's that we use have moved, in the installed vLLM or in a source."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from engine_bridge.driver.vllm_api.check import Facts, check
from engine_bridge.driver.vllm_api.inventory import ALL
from engine_bridge.driver.vllm_api.live import Live
from engine_bridge.driver.vllm_api.report import by_feature, lines
from engine_bridge.driver.vllm_api.source import NoSource, Source

EXIT_MOVED = 1


def main(arguments: list[str]) -> int:
    """Print the result of the check, for people or as JSON; returns EXIT_MOVED if a name has moved, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_bridge.driver.vllm_api",
        description="Say which names of vLLM's that we use have moved. Without --source, the installed vLLM is imported and looked at.",
    )
    parser.add_argument(
        "--source", type=Path, metavar="PLACE", help="read this folder or wheel; nothing is imported"
    )
    parser.add_argument("--json", action="store_true", help="one line for scripts")
    options = parser.parse_args(arguments)
    try:
        facts: Facts = Source(options.source) if options.source is not None else Live()
        reports = by_feature(ALL, check(ALL, facts))
    except NoSource as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([report.as_json() for report in reports]))
    else:
        print(*lines(reports), sep="\n")
    return EXIT_MOVED if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
