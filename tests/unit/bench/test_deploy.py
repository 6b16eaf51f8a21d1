"""The Dockerfile, compose.yaml and what they refer to agree with one another and with the code. `make dockerfile` runs the steps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from bench.deploy.steps import Step, assignments, context_files, expand, instructions, is_sent, stages, words
from gateway.settings.config import SETTINGS
from tests.conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
VARIABLES = {f"OVERTURE_{setting.name.upper()}" for setting in SETTINGS}


def compose(path: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return found


def test_both_devices_have_a_target_and_the_cpu_is_built_by_default() -> None:
    found = stages(DOCKERFILE)
    assert list(found)[-1] == "cpu" and "cuda" in found
    for device in ("cpu", "cuda"):
        steps = found[device].steps
        assert Step("ENV", f"OVERTURE_DEVICE={device}") in steps
        assert steps[-1].word == "USER" and not steps[-1].text.startswith("0"), "it ends as an ordinary user"


def test_the_image_has_the_torch_that_make_installs() -> None:
    script = (ROOT / "requirements/install.sh").read_text()
    (version,) = re.findall(r"^torch=(\S+)$", script, re.MULTILINE)
    (index,) = re.findall(r"^torch_index=(\S+)$", script, re.MULTILINE)
    assert f"ARG TORCH_VERSION={version}\n" in DOCKERFILE and f"ARG TORCH_INDEX={index}\n" in DOCKERFILE


def test_variables_of_the_image_and_of_compose_are_settings() -> None:
    named = set(re.findall(r"\bOVERTURE_[A-Z_]+(?==)", DOCKERFILE))
    named |= set(compose()["services"]["overture"]["environment"])
    assert named and named <= VARIABLES


def test_what_the_image_copies_reaches_the_build_and_nothing_else_of_weight_does() -> None:
    sent = set(context_files(ROOT))
    for stage in stages(DOCKERFILE).values():
        for step in stage.steps:
            if step.word == "COPY" and not step.text.startswith("--from"):
                for path in step.text.split()[:-1]:
                    assert any(each == path or each.startswith(f"{path}/") for each in sent), path
    folders = {each.partition("/")[0] for each in sent}
    assert not folders & {"tests", "bench", "docs", ".git", ".venv", "overture.toml", "data"}
    assert not any("__pycache__" in each for each in sent)


def test_the_last_pattern_that_fits_decides_what_reaches_the_build() -> None:
    patterns = ["*", "!demo", "!requirements/cpu.txt", "**/__pycache__"]
    assert is_sent("demo/model/config.json", patterns) and is_sent("requirements/cpu.txt", patterns)
    assert not is_sent("demo/__pycache__/x.pyc", patterns) and not is_sent("requirements/cpu.in", patterns)
    assert not is_sent("README.md", patterns)


def test_a_dockerfile_is_read_as_docker_reads_it() -> None:
    text = 'ARG IMAGE=some:1\nFROM ${IMAGE} AS one\n# why\nENV A=1 \\\n    B=$A:2\nCMD ["x", "y"]\nFROM one AS two\nUSER 5:5\n'
    found = stages(text)
    assert (found["one"].base, found["two"].base) == ("some:1", "one")
    assert found["one"].steps[0] == Step("ENV", "A=1 B=$A:2")
    assert assignments("A=1 B=$A:2", {"A": "0"}) == {"A": "1", "B": "0:2"}
    assert expand("${A}-$B", {"A": "x"}) == "x-" and words('["x", "y"]') == ["x", "y"]
    with pytest.raises(ValueError, match="exec form"):
        words("overture serve")
    with pytest.raises(ValueError, match="ONBUILD is not known"):
        list(instructions("ONBUILD RUN x"))


def test_compose_mounts_files_that_are_there_and_publishes_on_loopback_only() -> None:
    for name, service in compose()["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose()["volumes"] or (ROOT / source).is_file(), source
    assert compose("docs/deploy/compose.cuda.yaml")["services"]["overture"]["build"]["target"] in stages(
        DOCKERFILE
    )


def test_prometheus_and_grafana_find_what_they_are_told_of() -> None:
    services = compose()["services"]
    (job,) = compose("docs/deploy/prometheus.yml")["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in services and services[host]["ports"][0].endswith(f":{port}")
    (source,) = compose("docs/deploy/grafana/datasource.yaml")["datasources"]
    assert source["url"].removeprefix("http://").partition(":")[0] in services
    dashboard = (ROOT / "docs/deploy/grafana/overture.json").read_text()
    assert set(re.findall(r'"uid": "(.*)"', dashboard)) == {source["uid"], "overture"}
    (provider,) = compose("docs/deploy/grafana/dashboards.yaml")["providers"]
    assert any(f":{provider['options']['path']}/" in each for each in services["grafana"]["volumes"])
