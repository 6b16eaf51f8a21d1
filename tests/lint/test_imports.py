"""Import purity: what must stay light and free of the engine is loaded in a fresh interpreter, and looked at."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = {"torch", "vllm", "transformers", "numpy"}
# Of agents, whose hooks load them when they are attached.
FRAMEWORKS = {"langchain_core", "langgraph", "agents", "crewai", "metagpt", "openai"}


def loaded_by(module: str) -> set[str]:
    """The names of all modules that are there after `import module`, beyond those of a bare interpreter."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def policy_modules() -> list[str]:
    """Every module of the packages that decide and do nothing else."""
    names = ("engine_bridge/core", "engine_bridge/policy", "gateway/policy", "kvtiers/policy")
    folders = (ROOT / name for name in names)
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files
    ]


@pytest.mark.parametrize("module", ["engine_bridge.protocol.node", *policy_modules()])
def test_core_policy_and_the_node_protocol_load_without_asyncio_or_the_engine(module: str) -> None:
    assert loaded_by(module) & (ENGINE | {"asyncio", "aiohttp"}) == set()


@pytest.mark.parametrize(
    "module",
    [
        "gateway",
        "gateway.settings.config",
        "gateway.cli",
        "gateway.errors",
        "gateway.settings.logs",
        "engine_bridge",
    ],
)
def test_the_light_modules_load_without_the_engine_or_the_server(module: str) -> None:
    assert loaded_by(module) & (ENGINE | {"aiohttp", "asyncio"}) == set()


@pytest.mark.parametrize(
    "module", ["gateway.app", "gateway.nodes.engine_process", "engine_bridge.local_node"]
)
def test_the_engine_is_not_loaded_before_its_environment_is_set(module: str) -> None:
    """Nor before the gateway answers: it takes eight seconds. Nor is the SDK of tools, which most servers never need."""
    assert loaded_by(module) & {"torch", "vllm", "transformers", "mcp", "httpx2"} == set()


CHAT = ["overture_client.chat", "overture_client.terminal", "overture_client.command"]
CALLS = [f"overture_client.{name}" for name in ("client", "call_graph", "advisor")]
HOOKS = [f"overture_client.hooks.{name}" for name in ("langgraph", "openai_agents", "crewai", "metagpt")]


@pytest.mark.parametrize("module", [*CHAT, *CALLS, *HOOKS])
def test_the_client_loads_nothing_of_the_server_and_no_framework(module: str) -> None:
    loaded = loaded_by(module)
    ours = {name for name in loaded if name.split(".")[0] in {"gateway", "engine_bridge", "kvtiers"}}
    assert ours == set()
    # The chat needs no HTTP client; calls of the API do.
    assert loaded & (ENGINE | FRAMEWORKS | ({"aiohttp"} if module in CHAT else set())) == set()


@pytest.mark.parametrize("module", ["gateway.app", "gateway.commands.node_command"])
def test_no_gateway_loads_ray(module: str) -> None:
    """Nor with several nodes: a process of its own drives it."""
    assert "ray" not in {name.split(".")[0] for name in loaded_by(module)}


def test_no_bench_needs_the_tests_or_what_only_they_install() -> None:
    """`make bench` runs where `make serve` ran: there is no pytest."""
    imports = {
        (path.relative_to(ROOT).as_posix(), name.split(".")[0])
        for path in (ROOT / "bench").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
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
