"""Import purity: what must stay light and free of the engine is loaded in a fresh interpreter, and looked at."""

import ast
import subprocess
import sys

import pytest

from .sources import ROOT, nodes_by_path

ENGINE = {"torch", "vllm", "transformers", "numpy"}
# Of agents, whose hooks load them when they are attached.
FRAMEWORKS = {"langchain_core", "langgraph", "agents", "crewai", "metagpt", "openai"}


def loaded_by(*modules: str) -> set[str]:
    """The names of all modules that are there after these are imported, beyond those of a bare interpreter."""
    code = f"import sys; before = set(sys.modules); import {', '.join(modules)}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def policy_modules() -> list[str]:
    """Every module of the packages that decide and do nothing else."""
    names = ("engine_bridge/core", "engine_bridge/policy", "kvtiers/policy")
    files = [path for name in names for path in (ROOT / name).rglob("*.py")]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files
    ]


def test_core_policy_and_the_node_protocol_load_without_asyncio_or_the_engine() -> None:
    found = loaded_by("engine_bridge.protocol.node", *policy_modules())
    assert found & (ENGINE | {"asyncio", "aiohttp"}) == set()


def test_the_light_modules_load_without_the_engine_or_the_server() -> None:
    light = [f"gateway.{name}" for name in ("settings.config", "cli", "errors", "settings.logs")]
    assert loaded_by(*light, "engine_bridge") & (ENGINE | {"aiohttp", "asyncio"}) == set()


def test_the_engine_is_not_loaded_before_its_environment_is_set_and_ray_never() -> None:
    """Nor before the gateway answers: it takes eight seconds. Nor is the SDK of tools, which most servers never need.

    Ray is driven by a process of its own, with several nodes, too.
    """
    node = ("gateway.nodes.engine_process", "gateway.commands.node_command", "engine_bridge.local_node")
    found = {name.split(".")[0] for name in loaded_by("gateway.app", *node)}
    assert found & {"torch", "vllm", "transformers", "mcp", "httpx2", "ray"} == set()


CHAT = ["overture_client.chat", "overture_client.terminal", "overture_client.command"]
CALLS = [f"overture_client.{name}" for name in ("client", "call_graph", "advisor")]
HOOKS = [f"overture_client.hooks.{name}" for name in ("langgraph", "openai_agents", "crewai", "metagpt")]


@pytest.mark.parametrize(
    ("modules", "more"), [(CHAT, {"aiohttp"}), (CALLS + HOOKS, set())], ids=["chat", "calls"]
)
def test_the_client_loads_nothing_of_the_server_and_no_framework(modules: list[str], more: set[str]) -> None:
    """The chat needs no HTTP client; calls of the API do."""
    loaded = loaded_by(*modules)
    assert {name.split(".")[0] for name in loaded} & {"gateway", "engine_bridge", "kvtiers"} == set()
    assert loaded & (ENGINE | FRAMEWORKS | more) == set()


def test_no_bench_needs_the_tests_or_what_only_they_install() -> None:
    """`make bench` runs where `make serve` ran: there is no pytest."""
    imports = {
        (path, name.split(".")[0])
        for path, nodes in nodes_by_path("bench").items()
        for node in nodes
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    # They were found at all, those inside functions too.
    assert ("bench/live/gateway.py", "bench") in imports
    assert {each for each in imports if each[1] in {"tests", "pytest"}} == set()
