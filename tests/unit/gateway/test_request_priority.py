"""Weights and priorities: what is taken, and what is refused in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.auth import KeyRing, key_file_line
from gateway.errors import GatewayError
from gateway.settings.config import ConfigError
from gateway.settings.priorities import MAX_PRIORITY, checked_priority, parse_weights
from gateway.settings.sources import load_config


def load(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **options: Any) -> Any:
    return load_config(flags or {}, environ or {}, **{"cwd": Path("/nonexistent"), **options})


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_come_from_flags_environment_and_both_forms_of_a_file(tmp_path: Path) -> None:
    wanted = {"ada": 2.0, "bob": 0.5}
    file = tmp_path / "overture.toml"
    file.write_text('tenant_weights = ["ada=2", "bob=0.5"]\n')
    as_list = load(cwd=tmp_path)
    file.write_text("[tenant_weights]\nada = 2\nbob = 0.5\n")
    as_table = load(cwd=tmp_path)
    flags = load({"tenant_weights": ("ada=2", "bob=0.5")})
    environ = load(environ={"OVERTURE_TENANT_WEIGHTS": "ada=2, bob=0.5"})
    for config in (as_list, as_table, flags, environ):
        assert parse_weights(config.tenant_weights) == wanted


@pytest.mark.parametrize(
    "entry",
    [
        "ada",
        "ada=",
        "=2",
        "ada=0",
        "ada=-1",
        "ada=nan",
        "ada=inf",
        "ada=1e999",
        "ada=two",
        "a da=2",
        "a:b=2",
        "ada=1=2",
        "ada=.",
        "x" * 65 + "=1",
    ],
)
def test_a_weight_of_another_form_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"tenant_weights: expected NAME=WEIGHT .*flag --tenant-weight"):
        load({"tenant_weights": (entry,)})


def test_a_table_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    for text in ("[tenant_weights]\nada = true\n", "[tenant_weights.ada]\nx = 1\n", "tenant_weights = 5\n"):
        (tmp_path / "overture.toml").write_text(text)
        with pytest.raises(ConfigError, match="tenant_weights"):
            load(cwd=tmp_path)


def test_one_name_has_one_weight() -> None:
    assert parse_weights(["ada=2", "ada=2.0"]) == {"ada": 2.0}
    with pytest.raises(ValueError, match="ada has two weights"):
        parse_weights(["ada=2", "ada=3"])


@given(st.floats(min_value=1e-300, max_value=1e300), st.from_regex(r"[^:\s=]{1,64}", fullmatch=True))
def test_any_positive_number_is_a_weight(weight: float, name: str) -> None:
    assert parse_weights([f"{name}={weight}"]) == {name: weight}


def test_a_key_has_its_weight_and_others_have_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"ada": "ov-key-of-ada-for-tests", "bob": "ov-key-of-bob-for-tests"}
    file = tmp_path / "keys"
    file.write_text("\n".join(key_file_line(name, key) for name, key in keys.items()))
    ring = KeyRing(key_file=file, weights={"ada": 3.0})
    assert {name: ring.authenticate(key).weight for name, key in keys.items()} == {"ada": 3.0, "bob": 1.0}
    assert "no key named" not in caplog.text
    KeyRing(key_file=file, weights={"carl": 3.0})
    assert "no key named carl" in caplog.text


def test_settings_that_vllm_s_own_queue_does_not_look_at_are_told() -> None:
    flags = {"tenant_weights": ("ada=2",), "client_priority": True, "scheduling_policy": "vllm"}
    (warning,) = load(flags).warnings()
    assert "tenant_weights and client_priority change nothing" in warning
    assert load(flags | {"scheduling_policy": "mlq"}).warnings() == []


@pytest.mark.parametrize("name", ["mine", "mine:", ":Own", "mine:Own:x", "mine Own"])
def test_a_predictor_is_a_module_and_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="length_predictor: expected module:Name"):
        load({"length_predictor": name})
    assert load({"length_predictor": "my.mod:Own.Inner"}).length_predictor == "my.mod:Own.Inner"


# -- priority ----------------------------------------------------------------------------------------------------------


@given(st.integers(), st.booleans())
def test_a_client_can_wait_and_hurry_only_where_it_may(value: int, may_hurry: bool) -> None:
    low = -MAX_PRIORITY if may_hurry else 0
    if low <= value <= MAX_PRIORITY:
        assert checked_priority(value, may_hurry=may_hurry) == value
        return
    with pytest.raises(GatewayError) as raised:
        checked_priority(value, may_hurry=may_hurry)
    assert (raised.value.code, raised.value.param) == ("bad_request", "priority")
    assert f"from {low} to {MAX_PRIORITY}" in raised.value.message


@given(st.booleans() | st.floats() | st.text() | st.lists(st.integers(), max_size=1))
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(GatewayError, match="must be an integer"):
        checked_priority(value, may_hurry=True)


def test_without_one_it_is_zero() -> None:
    assert checked_priority(None, may_hurry=False) == 0
