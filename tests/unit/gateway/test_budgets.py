"""Budgets in requests: the pure rules, and the two objects that apply them."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.access.auth import KeyRing
from gateway.access.budgets import WRONG_KEYS, Gatekeeper, RequestBudgets, network_of, retry_after
from gateway.access.rates import MAX_WAIT_S, MIN_WAIT_S, Concurrency, Rates
from gateway.doors.http.web_policy import error_reply
from gateway.errors import GatewayError, to_frame
from gateway.metrics.metrics import Metrics
from gateway.settings.config import Config
from gateway.settings.sources import load_config

KEY = "ov-" + "k" * 43


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def refused(found: Metrics, budget: str) -> float:
    return found.registry.get_sample_value("overture_requests_refused_total", {"budget": budget}) or 0.0


# -- rates -----------------------------------------------------------------------------------------------------------


def test_a_bucket_holds_a_burst_and_then_fills_at_its_rate() -> None:
    rates = Rates(per_s=2, burst=3)
    assert [rates.take("a", 0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert rates.take("a", 0.4) == pytest.approx(0.1)
    assert rates.take("a", 0.5) == 0 and rates.take("a", 0.5) == 0.5
    assert [rates.take("a", 100.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_names_have_buckets_of_their_own() -> None:
    rates = Rates(per_s=1, burst=1)
    assert rates.take("a", 0.0) == 0 and rates.take("b", 0.0) == 0
    assert rates.take("a", 0.0) == 1


@given(
    st.lists(st.floats(0, 3), max_size=200),
    st.floats(0.1, 50),
    st.integers(1, 20),
)
def test_no_more_pass_than_the_burst_and_what_the_rate_gives(
    gaps: list[float], per_s: float, burst: int
) -> None:
    rates, now, passed = Rates(per_s, burst), 0.0, 0
    for gap in gaps:
        now += gap
        passed += rates.take("a", now) == 0
        assert passed <= burst + now * per_s + 1e-3


@given(st.lists(st.floats(0, 3), min_size=1, max_size=100), st.floats(0.1, 50), st.integers(1, 20))
def test_who_waits_as_long_as_told_gets_in(gaps: list[float], per_s: float, burst: int) -> None:
    rates, now = Rates(per_s, burst), 0.0
    for gap in gaps:
        now += gap
        wait_s = rates.take("a", now)
        if wait_s:
            now += wait_s
            assert rates.take("a", now) == 0


def test_names_are_forgotten_before_they_take_memory_and_the_busiest_last() -> None:
    rates = Rates(per_s=1, burst=5, max_names=10)
    for _ in range(5):
        rates.take("busy", 0.0)
    for number in range(1000):
        rates.take(f"n{number}", 0.0)
        assert len(rates) <= 10
    assert rates.take("busy", 0.0) == 1


@pytest.mark.parametrize(("per_s", "burst"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0.5)])
def test_rates_without_sense_are_refused(per_s: float, burst: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Rates(per_s, burst)


# -- places ----------------------------------------------------------------------------------------------------------


def test_places_are_counted_by_name_and_come_back() -> None:
    places = Concurrency(2)
    assert places.enter("a") == places.enter("a") == places.enter("b") == 0
    assert places.enter("a") > 0 and places.inside("a") == 2
    places.leave("a", 1.0)
    assert places.enter("a") == 0 and places.enter("a") > 0


def test_the_wait_for_a_place_follows_how_long_requests_last() -> None:
    places = Concurrency(2)
    places.enter("a")
    waits = []
    for _ in range(200):
        places.enter("a")
        waits.append(places.enter("a"))
        places.leave("a", 20.0)
    assert waits[0] == MIN_WAIT_S and waits[-1] == pytest.approx(10.0, rel=0.01)
    for _ in range(200):
        places.enter("a")
        places.leave("a", 4000.0)
    places.enter("a")
    assert places.enter("a") == MAX_WAIT_S


def test_a_name_without_requests_is_forgotten() -> None:
    places = Concurrency(1)
    for number in range(100):
        places.enter(f"n{number}")
        places.leave(f"n{number}", 1.0)
    assert places._inside == {} and places._lasts_s == {}


# -- what is told ----------------------------------------------------------------------------------------------------


def test_a_refusal_says_when_to_come_back_and_is_counted() -> None:
    clock, found = Clock(), metrics()
    budgets = RequestBudgets(found, per_s=0.25, max_concurrent=1, clock=clock)
    budgets.count("a")
    with pytest.raises(GatewayError) as caught:
        budgets.count("a")
    assert (caught.value.code, caught.value.retry_after_s) == ("rate_limited", pytest.approx(3.0))
    assert "--max-requests-per-s" in caught.value.message and refused(found, "rate") == 1


def test_a_place_is_given_back_once() -> None:
    found = metrics()
    budgets = RequestBudgets(found, max_concurrent=1, clock=Clock())
    with budgets.enter("a") as place:
        with pytest.raises(GatewayError, match="--max-concurrent-requests") as caught:
            budgets.enter("a")
        assert caught.value.code == "rate_limited" and caught.value.retry_after_s == 2.0
        place.leave()
    place.leave()
    with budgets.enter("a"):
        assert refused(found, "concurrency") == 1
        with pytest.raises(GatewayError):
            budgets.enter("a")


@pytest.mark.parametrize(
    ("changes", "per_s", "most"),
    [
        ({"api_keys": (KEY,)}, 100, 256),
        ({"api_keys": (KEY,), "max_num_seqs": 2}, 100, 64),
        ({}, 1000, 2560),
        ({"max_requests_per_s": 3.5, "max_concurrent_requests": 7}, 3.5, 7),
    ],
)
def test_unset_limits_follow_the_engines_size_and_whether_one_owner_is_everybody(
    changes: dict[str, Any], per_s: float, most: int
) -> None:
    budgets = RequestBudgets.of(Config(**changes), metrics())
    assert (budgets._rates.per_s, budgets._concurrency.limit) == (per_s, most)


def test_the_limits_are_settings_like_all_others() -> None:
    environ = {"OVERTURE_MAX_REQUESTS_PER_S": "2.5"}
    config = load_config({"max_concurrent_requests": "9"}, environ)
    assert (config.max_requests_per_s, config.max_concurrent_requests) == (2.5, 9)
    for flags in ({"max_requests_per_s": "0"}, {"max_concurrent_requests": "0"}):
        with pytest.raises(GatewayError, match="expected"):
            load_config(flags, {})


@pytest.mark.parametrize(("wait_s", "told_s"), [(0.01, 1), (1.0, 1), (1.2, 2), (29.9, 30)])
def test_retry_after_is_in_whole_seconds_and_never_too_early(wait_s: float, told_s: int) -> None:
    error = GatewayError("rate_limited", "x", retry_after_s=wait_s)
    request = make_mocked_request("GET", "/v1/models")
    response = error_reply(request, error)
    assert (response.status, response.headers["Retry-After"]) == (429, str(told_s))
    assert retry_after(wait_s) == told_s and to_frame(error)["retry_after_s"] == wait_s


# -- wrong keys ------------------------------------------------------------------------------------------------------


def guess(gatekeeper: Gatekeeper, key: str, remote: str = "192.0.2.1") -> str:
    try:
        return gatekeeper.authenticate(key, remote).name
    except GatewayError as error:
        assert error.close_code == 4401, "a socket that guesses is closed"
        return error.code


def test_wrong_keys_are_slowed_by_address() -> None:
    clock, found = Clock(), metrics()
    gatekeeper = Gatekeeper(KeyRing([KEY]), found, clock)
    assert {guess(gatekeeper, f"wrong-key-number-{n}") for n in range(WRONG_KEYS)} == {"unauthorized"}
    assert guess(gatekeeper, "wrong-key-and-one-more") == "rate_limited" and refused(found, "wrong_keys") == 1
    assert guess(gatekeeper, "wrong-key-of-a-neighbour", "192.0.2.2") == "unauthorized"
    clock.now += 2
    assert guess(gatekeeper, "wrong-key-after-a-while") == "unauthorized"
    assert guess(gatekeeper, "wrong-key-after-a-while") == "rate_limited"


def test_a_good_key_gets_in_however_many_wrong_ones_came_from_its_address() -> None:
    gatekeeper = Gatekeeper(KeyRing([KEY]), metrics(), Clock())
    for number in range(1000):
        guess(gatekeeper, f"wrong-key-number-{number}")
    assert guess(gatekeeper, KEY).startswith("key-")


def test_a_key_that_can_be_guessed_is_not_looked_at_above_the_bound() -> None:
    clock = Clock()
    gatekeeper = Gatekeeper(KeyRing(["secret"]), metrics(), clock)
    for number in range(WRONG_KEYS):
        guess(gatekeeper, f"guess{number}")
    assert guess(gatekeeper, "secret") == "rate_limited"
    clock.now += 2
    assert guess(gatekeeper, "secret").startswith("key-")


def test_a_missing_key_is_no_guess() -> None:
    gatekeeper = Gatekeeper(KeyRing([KEY]), metrics(), Clock())
    for _ in range(100):
        with pytest.raises(GatewayError, match="asks for an API key"):
            gatekeeper.authenticate(None, "192.0.2.1")
    assert guess(gatekeeper, "wrong-key-of-some-length") == "unauthorized"


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix:", "unix:"),
    ],
)
def test_addresses_of_one_customer_are_one(address: str, network: str) -> None:
    assert network_of(address) == network
