"""What the two wheels ask for agrees with what the code imports, with what is tested, and with what the documentation says."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable

import pytest

from overture_client import __version__

from .sources import ROOT, nodes_by_path

OURS = {"gateway", "engine_bridge", "kvtiers", "overture_client"}
# Import names that are not the names of their distributions.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "docx": "python-docx",
    "jwt": "pyjwt",
    "pythonjsonlogger": "python-json-logger",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
# Come with the engine; only the driver imports them (lint-imports), and it is only loaded where there is one.
OF_THE_ENGINE = set(
    """
    fastapi huggingface-hub jinja2 jsonschema llvmlite numba openai opentelemetry pydantic pydantic-core tokenizers torch torchvision transformers
    vllm
    """.split()
)
OF_CLUSTERS = {"cryptography", "ray"}
# Whoever uses a hook has its framework.
FRAMEWORKS = {"agents", "crewai", "httpx", "langchain-core", "langgraph", "metagpt"}


def name_of(requirement: str) -> str:
    return re.split(r"[=<>!~\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def imported_by(folder: str) -> set[str]:
    """The distributions that the modules under `folder` import, by name."""
    found: set[str] = set()
    for nodes in nodes_by_path(folder).values():
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    others = found - OURS - set(sys.stdlib_module_names)
    return {DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in others}


def server_dependencies() -> set[str]:
    """The names that `DEPENDENCIES` of setup.py has."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEPENDENCIES":
            return set(map(name_of, ast.literal_eval(node.value)))
    raise AssertionError("setup.py has no DEPENDENCIES")


def client_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "overture_client" / "pyproject.toml").read_text(encoding="utf-8"))
    return set(map(name_of, project["project"]["dependencies"]))


def lines_of(name: str) -> Iterable[str]:
    return (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()


def test_the_client_asks_for_exactly_what_it_imports() -> None:
    assert client_dependencies() == imported_by("overture_client") - FRAMEWORKS


def test_the_server_asks_for_exactly_what_it_imports() -> None:
    imported = set().union(*map(imported_by, OURS - {"overture_client"}))
    assert server_dependencies() == imported - OF_THE_ENGINE - OF_CLUSTERS


def test_the_extra_for_clusters_has_what_only_clusters_import() -> None:
    assert set(map(name_of, lines_of("ray.in"))) >= OF_CLUSTERS


@pytest.mark.parametrize("extra", ["cpu.txt", "cuda.txt"])
def test_the_tested_lists_have_every_dependency(extra: str) -> None:
    listed = set(map(name_of, lines_of(extra)))
    # vLLM's own dependencies, which pip resolves there, have these.
    of_vllm = (
        {"llguidance", "numpy", "pillow", "prometheus-client", "pyyaml", "safetensors"}
        if extra == "cuda.txt"
        else set()
    )
    assert server_dependencies() | client_dependencies() <= listed | of_vllm


def test_the_documentation_installs_the_versions_that_are_tested() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    alone = [line.removeprefix("#nodeps ") for line in lines_of("cpu.in") if line.startswith("#nodeps ")]
    command = re.search(r"pip install --no-deps (.+)", text)
    assert command is not None and sorted(command[1].split()) == sorted(alone)
    script = (ROOT / "requirements" / "install.sh").read_text(encoding="utf-8")
    torch = re.search(r"^torch=(.+)$", script, re.MULTILINE)
    assert torch is not None and f"torch=={torch[1]}+cpu" in text


def test_the_changelog_has_notes_of_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    unreleased, (newest, date), *_ = headings
    assert unreleased == ("Unreleased", "") and newest == __version__
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
