"""Engine arguments of vLLM's that a user gives by name."""

from __future__ import annotations

import dataclasses

import pytest

from engine_bridge.driver.engine.engine_arguments import typed
from engine_bridge.driver.vllm_api import EngineArgs
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.settings.engine_arguments import RULED_OUT, parse


def test_values_have_the_types_that_vllm_gives_them() -> None:
    given = [
        "cpu-offload-gb=4",
        'hf_overrides={"a": 1}',
        "disable_cascade_attn=true",
        "enable-eplb=0",
        "load_format=dummy",
    ]
    assert typed(parse(given, {})) == {
        "cpu_offload_gb": 4.0,
        "hf_overrides": {"a": 1},
        "disable_cascade_attn": True,
        "enable_eplb": False,
        "load_format": "dummy",
    }
    for name, value, reason in (
        ("cpu_offload_gb", "much", "much"),
        ("cpu_offload", "4", "did you mean cpu_offload_gb"),
        ("enable_eplb", "perhaps", "true or false"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            typed({name: value})
    assert typed({}) == {}


def test_what_is_ruled_out_is_something_that_vllm_has() -> None:
    assert RULED_OUT.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (["seed"], "NAME=VALUE"),
        (["=4"], "NAME=VALUE"),
        (["seed=4"], "--seed"),
        (["scheduler-cls=x"], "scheduler_cls cannot be set here"),
        (["cpu_offload_gb=4", "cpu-offload-gb=5"], "twice"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason(pairs: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(pairs, {"seed": "--seed"})
