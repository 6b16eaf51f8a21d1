"""What the examples share: their arguments, and the line of JSON that they end with."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

ROUNDS = 3  # reviews and revisions, as in SYMPHONY's evaluation of MetaGPT
MAX_TOKENS = 48


def arguments(description: str) -> argparse.Namespace:
    """The command line. Exits with a message for a wrong one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000/v1", help="the gateway (default: %(default)s)"
    )
    parser.add_argument("--model", required=True, help="a model or an adapter of the gateway: see /v1/models")
    parser.add_argument("--api-key", default=None, help="where the gateway asks for one")
    parser.add_argument("--run-id", default=None, help="go on with an earlier run's sessions")
    parser.add_argument("--task", default="Write a game of snake.", help="what the agents work on")
    return parser.parse_args()


def needs(framework: str, install: str) -> None:
    """Exit and say what to install if `framework`, a module, is not there."""
    try:
        __import__(framework)
    except ImportError as error:
        sys.exit(f"This example needs {framework} ({error}). Install it with: pip install {install}")


def print_report(report: dict[str, Any]) -> None:
    """The last line of an example."""
    print(json.dumps(report, sort_keys=True))
