"""What serves, measured on a device in virtual time.

python -m bench.emulated COMMAND [options]
"""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "adaptivellm": "tight memory: swap or recompute by cost, and who starts",
    "agree": "the lean model, the emulated node and the live engine on the same requests",
    "caraserve": "cold adapters: a host that helps, against loads that are waited for",
    "chameleon": "adapters: queues and caches over loads, by the paper's device and requests",
    "symphony": "people who type, on one node: advisories over tiers, tiers over none",
    "scarce": "people who type, where device and host memory hold few of their conversations",
    "urgent": "urgent requests: others paused for them, or never",
    "order": "orders of starting against vLLM's own queue: never worse, and what is gained",
    "exact": "fcfs is vLLM's own order, policies repeat, and what our scheduling costs",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        module = importlib.import_module(f"bench.emulated.{name}")
        command = commands.add_parser(
            name, help=about, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
