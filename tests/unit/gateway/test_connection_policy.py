"""Who may connect, who makes room, and what is overdue: decisions without sockets and clocks."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network

import pytest

from gateway.doors.http.admission import (
    Admission,
    BodyFacts,
    NewConnection,
    RareLine,
    Watermark,
    address_of,
    admit,
    body_overdue,
    is_shared,
    limits_for,
)

LIMITS = limits_for(4096, 10_000, None, None)
QUIET = NewConnection(
    num_all=10, num_of_address=2, has_unfinished_of_address=True, has_unfinished=True, has_idle=True
)
FULL = replace(QUIET, num_all=LIMITS.num_general)


@pytest.mark.parametrize(
    ("max_files", "total"),
    [(256, 128), (1024, 512), (4096, 3584), (20_000, 19_488), (1 << 20, 20_000)],
)
def test_files_are_kept_back_for_everything_else(max_files: int, total: int) -> None:
    limits = limits_for(max_files, 10_000, None, None)
    assert limits.num_total == total
    assert limits.num_per_address <= total // 2
    assert 0 < limits.num_general < total


def test_the_operators_numbers_count_as_far_as_there_are_files() -> None:
    limits = limits_for(20_000, 10_000, 300, 50)
    assert (limits.num_total, limits.num_general, limits.num_per_address) == (300, 270, 50)
    assert limits_for(1024, 10_000, 5000, 5000).num_total == 512
    assert limits_for(1024, 10_000, 5000, 5000).num_per_address == 512
    assert limits_for(1024, 10_000, 1, None).num_general == 1


def test_there_is_room() -> None:
    assert admit(QUIET, LIMITS) == Admission(True)


def test_who_goes_when_connections_are_scarce() -> None:
    assert admit(FULL, LIMITS) == Admission(True, "oldest_unfinished")
    assert admit(replace(FULL, has_unfinished=False), LIMITS) == Admission(True, "oldest_idle")
    busy = replace(FULL, has_unfinished=False, has_idle=False)
    assert admit(busy, LIMITS) == Admission(True, is_reserved=True)
    assert admit(replace(busy, num_all=LIMITS.num_total), LIMITS) == Admission(False, reason="limit")


def test_scarce_files_count_like_scarce_connections() -> None:
    assert admit(replace(QUIET, are_files_scarce=True), LIMITS) == Admission(True, "oldest_unfinished")
    busy = replace(QUIET, are_files_scarce=True, has_unfinished=False, has_idle=False)
    assert admit(busy, LIMITS) == Admission(True, is_reserved=True)


def test_an_address_makes_room_among_its_own() -> None:
    greedy = replace(QUIET, num_of_address=LIMITS.num_per_address)
    assert admit(greedy, LIMITS) == Admission(True, "oldest_of_address")
    greedy = replace(greedy, has_unfinished_of_address=False)
    assert admit(greedy, LIMITS) == Admission(False, reason="address_limit")
    assert admit(replace(greedy, num_of_address=None), LIMITS) == Admission(True), "many share this address"


@pytest.mark.parametrize(
    ("body", "now_s", "reason"),
    [
        (BodyFacts(0, 0, 0), 19.9, None),
        (BodyFacts(0, 0, 0), 20, "body_timeout"),
        (BodyFacts(0, 100, 1 << 20), 119, None),
        (BodyFacts(0, 100, 1 << 20), 120, "body_timeout"),
        (BodyFacts(0, 59, 100), 61, "body_too_slow"),
        (BodyFacts(0, 187, 1 << 19), 188, "body_too_slow"),
        (BodyFacts(0, 187, 1 << 19), 187, None),
        (BodyFacts(0, 299, 16 << 20), 299, None),
        (BodyFacts(0, 299, 16 << 20), 300, "body_too_slow"),
        (BodyFacts(0, 319, 20 << 20), 319, None),
        (BodyFacts(0, 319, 20 << 20), 320, "body_too_slow"),
    ],
)
def test_when_a_body_is_no_longer_waited_for(body: BodyFacts, now_s: float, reason: str | None) -> None:
    assert body_overdue(body, now_s, 20) == reason


def test_a_warning_comes_once_until_it_has_been_over_for_good() -> None:
    mark = Watermark()
    said = [(used, mark.is_high) for used in (79, 80, 90, 75, 85, 70, 69, 75, 80) if mark.crossed(used, 100)]
    assert said == [(80, True), (69, False), (80, True)]


def test_a_frequent_line_is_written_now_and_then_with_a_number() -> None:
    line = RareLine(10)
    assert line.due(0) == 0
    line.add()
    assert line.due(1) == 1
    line.add(3)
    line.add()
    assert [line.due(now) for now in (2, 10.9, 11, 12)] == [0, 0, 4, 0]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 1234), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1234, 0, 0), "2001:db8:1:2::"),
        (("::ffff:192.0.2.7", 1234, 0, 0), "192.0.2.7"),
        (("fe80::1%eth0", 1234, 0, 2), "fe80::"),
        (("::1", 1234, 0, 0), "::1"),
        ("", ""),
        (None, ""),
    ],
)
def test_what_stands_for_an_address(peer: object, address: str) -> None:
    assert address_of(peer) == address


def test_which_addresses_many_share() -> None:
    proxies = [ip_network("10.0.0.0/8"), ip_network("2001:db8:1:2::5")]
    for shared in ("", "127.0.0.1", "127.8.8.8", "::1", "10.1.2.3", "2001:db8:1:2::"):
        assert is_shared(shared, proxies)
    for own in ("192.0.2.7", "2001:db8:1:3::"):
        assert not is_shared(own, proxies)
