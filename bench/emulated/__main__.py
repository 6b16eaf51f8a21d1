"""The benches in virtual time: vLLM's scheduler with ours on an emulated device, and studies of single policies.

python -m bench.emulated COMMAND [options]
"""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "adaptivellm": "tight memory: swap or recompute by cost, and which request starts",
    "caraserve": "cold adapters: a host that helps, against loads that are waited for",
    "routing": "which of 60 nodes serves a request, by the ranks of its adapters",
    "chameleon": "adapters: queues and caches over loads, by the paper's device and requests",
    "symphony": "people who type, on one node: advisories over tiers, tiers over none",
    "scarce": "people who type, where device and host memory hold few of their conversations",
    "urgent": "urgent requests: others paused for them, or never",
    "order": "orders of starting against vLLM's own queue: never worse, and what is gained",
    "exact": "fcfs is vLLM's own order, policies repeat, and what our scheduling costs",
    "adapter_cache": "which adapter leaves memory first, against LRU",
    "agents": "agents that call tools: how long their programs take, by order and by what is announced",
    "followers": "which agent calls next, against the rule that this agent calls again",
    "host_tier": "which KV leaves host memory first, against LRU",
    "length": "how long answers are predicted to be",
}


def main(arguments: list[str]) -> None:
    """Run the command that the arguments name. Only that command's module is imported: most of them load vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in arguments[:1]:
            module = importlib.import_module(f"bench.emulated.{name}")
            command.description = module.__doc__
            module.TABLE.add_arguments(command)
            command.set_defaults(run=module.TABLE.run)
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main(sys.argv[1:])
