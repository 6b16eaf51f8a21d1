"""What is written of the server is so: the OpenAPI document, with vLLM's own models in it, and the series that dashboard and alert rules ask for."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

import jsonschema_rs
import pytest
import yaml
from openapi_schema_validator import OAS31Validator
from openapi_schema_validator._specifications import REGISTRY as SPECIFICATIONS
from openapi_spec_validator import OpenAPIV31SpecValidator
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from engine_bridge.driver.apis.bodies import SERVER_FIELDS
from engine_bridge.protocol.figures import LaneStats, SchedulingStats
from gateway.app import Server
from gateway.metrics.metrics import Metrics
from gateway.metrics.scheduling import SchedulingCollector
from tests.conftest import ROOT

from .conftest import Gateways, told
from .facts import BODY, CHAT, KEYS, MODEL, Http, Patch

DASHBOARD, ALERTS = ROOT / "docs/deploy/grafana/overture.json", ROOT / "docs/deploy/alerts.yml"
SERIES = re.compile(r"\b(?:overture_|vllm:|process_)\w+")
GROUPED = re.compile(r"by \(([\w, ]+)\)")
SELECTED = re.compile(r'(\w+)(?:=|!=|=~|!~)"')
# Lanes are fitted after 16 requests: told here by the same collector, of lanes that are there.
FITTED = SchedulingStats(
    policy="mlq",
    num_running=0,
    num_waiting=0,
    num_by_reason={},
    lanes=LaneStats(boundaries=(), num_waiting=(0,), quota_tokens=(0,), used_tokens=(0,)),
    counts={},
    seconds={},
    length_errors=None,
)


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"] if not rule["expr"].startswith("up{"))


def of_text(text: str) -> Iterator[tuple[str, set[str]]]:
    for family in text_string_to_metric_families(text):
        yield from ((sample.name, set(sample.labels)) for sample in family.samples)


def of_instruments(metrics: Metrics) -> Iterator[tuple[str, set[str]]]:
    """What the gateway counts: a counter with labels has no sample before its first event."""
    for found in vars(metrics).values():
        if isinstance(found, MetricWrapperBase):
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
            for ending in endings.get(found._type, ("",)):
                yield found._name + ending, {*found._labelnames, *(["le"] * (ending == "_bucket"))}


async def test_dashboard_and_alerts_ask_for_series_and_labels_that_metrics_has(
    server: Server, http: Http
) -> None:
    await told(http.post(CHAT, json=BODY))
    text = await told(http.get("/metrics"))
    labels_of: dict[str, set[str]] = defaultdict(set)
    vllms = generate_latest(REGISTRY).decode()  # the tests' gateways have registries of their own
    for name, labels in (*of_text(text), *of_text(vllms), *of_instruments(server.services.metrics)):
        labels_of[name] |= labels
    for metric in SchedulingCollector(lambda: FITTED).collect():
        for sample in metric.samples:
            labels_of[sample.name] |= set(sample.labels)

    num_series = 0
    for expression in expressions():
        series = SERIES.findall(expression)
        assert series, expression
        wanted = {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
        wanted |= set(SELECTED.findall(expression))
        for name in series:
            assert name in labels_of, f"{name}: no such series"
            assert wanted <= labels_of[name], (
                f"{expression}: {name} has only the labels {sorted(labels_of[name])}"
            )
            num_series += 1
    assert num_series > 50


@pytest.fixture
def checks_schemas_quickly(monkeypatch: Patch) -> None:
    """The validator's own check of a schema, in Python, takes ten seconds for all of vLLM's."""
    known = jsonschema_rs.Registry([(name, SPECIFICATIONS.contents(name)) for name in SPECIFICATIONS])
    meta = jsonschema_rs.validator_for(OAS31Validator.META_SCHEMA, registry=known, validate_formats=True)
    monkeypatch.setattr(OAS31Validator, "check_schema", lambda schema, format_checker: meta.validate(schema))


@pytest.mark.usefixtures("checks_schemas_quickly")
async def test_the_document_is_valid_and_its_examples_work(http: Http) -> None:
    """The bodies are vLLM's, without what only the server sets."""
    found = await told(http.get("/openapi.json"))
    OpenAPIV31SpecValidator(found).validate()
    assert found["openapi"].startswith("3.1")
    for name in ("ChatCompletion", "Completion", "Responses", "AnthropicMessages"):
        fields = found["components"]["schemas"][f"{name}Request"]["properties"]
        assert {"model", "temperature", "kv_hints", "session_id", "priority"} <= fields.keys()
        # The gateway has these two of its own.
        assert not fields.keys() & (set(SERVER_FIELDS) - {"session_id", "priority"})
        assert fields["priority"]["anyOf"][0]["minimum"] == 0
    for path, item in found["paths"].items():
        body = item.get("post", {}).get("requestBody")
        # Whose example names a folder of somebody's, or whose path a node, or which another model answers (test_pooling.py), or whose
        # body is a file (test_pictures.py, test_documents.py in tests/unit/gateway), or which takes a key file (test_people_rest.py there).
        elsewhere = (
            "lora_adapter",
            "/embeddings",
            "/rerank",
            "/score",
            "/pictures",
            "/documents",
            "/admin/people",
            "/sign-in",
        )
        if body is None or path.endswith(elsewhere) or "{" in path:
            continue
        example = body["content"]["application/json"]["example"]
        async with http.post(path, json=example) as response:
            assert str(response.status) in item["post"]["responses"] and response.status < 300, path
        assert example.get("model", MODEL) == MODEL


async def test_document_and_page_ask_for_no_key(gateways: Gateways, http: Http) -> None:
    async with http.get("/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert paths["/api/sessions"]["get"]["security"] == [{}, {"bearer": []}, {"x-api-key": []}]
    assert paths["/healthz"]["get"]["security"] == []
    server = await gateways(api_keys=KEYS)
    async with Http(server.url) as http:
        found = await told(http.get("/openapi.json"))
        assert found["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"x-api-key": []}]
        async with http.get("/docs") as response:
            assert response.status == 200 and response.content_type == "text/html"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
