import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine_bridge.engine_metrics import engine_metrics, joined, own_metrics


def text_of_node(num: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Prompt tokens", ["engine"], registry=registry).labels("0").inc(num)
    times = Histogram("vllm:time_to_first_token_seconds", "TTFT", buckets=(1, 2), registry=registry)
    times.observe(num)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    assert len(values) == len(found), "no figure stands there twice"
    return values


def test_figures_of_several_nodes_are_told_apart_by_a_label() -> None:
    text = joined({"node-1": text_of_node(1), "node-2": text_of_node(2)})
    found = samples(text)
    for node, num in (("node-1", 1), ("node-2", 2)):
        assert found["vllm:prompt_tokens_total", frozenset({("engine", "0"), ("node", node)})] == num
        assert found["vllm:time_to_first_token_seconds_sum", frozenset({("node", node)})] == num
    assert text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1
    assert joined({}) == ""


@pytest.fixture
def counted() -> Counter:
    counter = Counter("vllm:of_a_test", "Of a test")
    yield counter
    REGISTRY.unregister(counter)


def test_vllms_figures_and_all_others_are_the_two_halves_of_a_registry(counted: Counter) -> None:
    counted.inc(3)
    engine = engine_metrics()
    assert "vllm:of_a_test_total 3.0" in engine
    own = own_metrics(REGISTRY).decode()
    assert "vllm:" not in own
    whole = samples(generate_latest(REGISTRY).decode()).keys()
    assert samples(engine).keys() | samples(own).keys() == whole
