"""The Dockerfile, compose.yaml and what they refer to agree with one another and with the code. `make dockerfile` lints and builds it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from gateway.settings.config import SETTINGS
from tests.conftest import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
VARIABLES = {f"OVERTURE_{setting.name.upper()}" for setting in SETTINGS}


def compose(path: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return found


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name, from one FROM to the next."""
    parts = re.split(r"^FROM \S+ AS ([\w-]+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_both_devices_have_a_target_and_the_cpu_is_built_by_default() -> None:
    found = stages()
    assert list(found)[-1] == "cpu" and "cuda" in found
    for device in ("cpu", "cuda"):
        assert f"ENV OVERTURE_DEVICE={device}\n" in found[device]
        last = re.findall(r"^[A-Z]+ .*", found[device], re.MULTILINE)[-1]
        assert last.startswith("USER ") and last != "USER 0", "it ends as an ordinary user"


def test_the_image_has_the_torch_that_make_installs() -> None:
    script = (ROOT / "requirements/install.sh").read_text()
    (version,) = re.findall(r"^torch=(\S+)$", script, re.MULTILINE)
    (index,) = re.findall(r"^torch_index=(\S+)$", script, re.MULTILINE)
    assert f"ARG TORCH_VERSION={version}\n" in DOCKERFILE and f"ARG TORCH_INDEX={index}\n" in DOCKERFILE


def test_variables_of_the_image_and_of_compose_are_settings() -> None:
    named = set(re.findall(r"\bOVERTURE_[A-Z_]+(?==)", DOCKERFILE))
    named |= set(compose()["services"]["overture"]["environment"])
    assert named and named <= VARIABLES


def test_compose_mounts_files_that_are_there_and_publishes_on_loopback_only() -> None:
    for name, service in compose()["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose()["volumes"] or (ROOT / source).is_file(), source
    assert compose("docs/deploy/compose.cuda.yaml")["services"]["overture"]["build"]["target"] in stages()


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


def test_the_unit_has_the_key_file_as_a_credential_and_names_settings() -> None:
    unit = (ROOT / "docs/deploy/overture.service").read_text()
    named = set(re.findall(r"\b(OVERTURE_[A-Z_]+)=", unit))
    assert named and named <= VARIABLES
    credentials = re.findall(r"^LoadCredential=(\w+):", unit, re.MULTILINE)
    assert credentials == re.findall(r"=%d/(\w+)$", unit, re.MULTILINE) == ["keys"]


def test_prometheus_reads_the_alert_rules() -> None:
    volumes = compose()["services"]["prometheus"]["volumes"]
    for name in compose("docs/deploy/prometheus.yml")["rule_files"]:
        assert f"./docs/deploy/{name}:/etc/prometheus/{name}:ro" in volumes
    (group,) = compose("docs/deploy/alerts.yml")["groups"]
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in group["rules"])
