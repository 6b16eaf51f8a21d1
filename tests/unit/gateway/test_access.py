"""Who gets in, and how much of the server one may take: keys, operators, budgets, shares and calls that end with their key."""

import asyncio
import hashlib
import logging
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from gateway.access import auth
from gateway.access.auth import LOCAL, KeyRing, Principal, Withdrawn, extract_key, generate_key
from gateway.access.budgets import WRONG_KEYS, Gatekeeper, RequestBudgets, retry_after
from gateway.access.key_file import key_file_line, line_for, owner_of
from gateway.access.open_calls import OpenCalls
from gateway.access.person_limits import PersonLimits
from gateway.access.rates import Rates
from gateway.access.shares import Shares
from gateway.doors.http.web_policy import error_reply
from gateway.errors import KINDS, GatewayError, StartupError, to_frame
from gateway.metrics.metrics import Metrics

from .parts import KEY, OTHER, Clock, key_file


def ring_of(folder: Path, *lines: str, **options: Any) -> KeyRing:
    """The keys of a file of these lines."""
    return KeyRing(key_file=key_file(folder, *lines), **options)


def is_refused(ring: KeyRing, presented: str | None) -> bool:
    with pytest.raises(GatewayError) as caught:
        ring.authenticate(presented)
    return caught.value.code == "unauthorized"


@pytest.mark.parametrize(
    "presented",
    [None, "", "wrong", KEY[:-1], KEY + "k", KEY.upper(), " " + KEY, KEY + "\0", "\ud800", "x" * 100_000],
)
def test_any_other_key_is_refused(presented: str | None) -> None:
    """A missing, near, malformed or huge key is `unauthorized`, never a crash."""
    assert is_refused(KeyRing([KEY, OTHER]), presented)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([KEY, OTHER, generate_key()])
    calls = []
    monkeypatch.setattr("gateway.access.auth.hmac.compare_digest", lambda a, b: calls.append(a) or a == b)
    assert ring.authenticate(KEY).owner != ring.authenticate(OTHER).owner
    assert is_refused(ring, "wrong") and len(calls) == 9


@pytest.fixture
def num_hashes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many hashes were compared since the last call."""
    made: list[bytes] = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: made.append(data) or sha256(data))

    def count() -> int:
        num = len(made)
        made.clear()
        return num

    return count


def old_line(name: str, key: str) -> str:
    """As earlier versions made them, and as the documentation lets anybody make them: with a salt of chance alone."""
    salt = secrets.token_bytes(16)
    return f"{name}:sha256${salt.hex()}${hashlib.sha256(salt + key.encode()).hexdigest()}"


@pytest.mark.parametrize(("make_line", "most"), [(key_file_line, 5), (old_line, 105)])
def test_a_key_is_found_in_a_long_file_with_one_hash_and_on_older_lines_is_looked_for_once(
    tmp_path: Path, num_hashes: Callable[[], int], make_line: Callable[..., str], most: int
) -> None:
    keys = [generate_key() for _ in range(100)]
    lines = [make_line(f"n{number}", key) for number, key in enumerate(keys)]
    ring = ring_of(tmp_path, *lines)
    num_hashes()
    for repeated in range(3):
        assert ring.authenticate(keys[50]).name == "n50"
        assert num_hashes() <= (5 if repeated else most)
    assert is_refused(ring, generate_key()) and num_hashes() <= most
    key_file(tmp_path, *lines[:50], *lines[51:], key_file_line("chief", keys[99], is_operator=True))
    assert {key.owner for key in ring.take_over(ring.read())} == {owner_of(keys[50])}
    assert is_refused(ring, keys[50]) and ring.authenticate(keys[99]).is_operator


def test_wrong_keys_cannot_keep_the_server_looking_for_them(
    tmp_path: Path, num_hashes: Callable[[], int]
) -> None:
    old, new, known = generate_key(), generate_key(), generate_key()
    lines = [old_line(f"n{number}", generate_key()) for number in range(2 * auth.MAX_COMPARED)]
    lines += [old_line("old", old), old_line("known", known), key_file_line("new", new)]
    gatekeeper = Gatekeeper(ring_of(tmp_path, *lines), Counted(), lambda: 0.0)

    def name_of(key: str, address: str = "192.0.2.1") -> str:
        return gatekeeper.authenticate(key, address).name

    assert name_of(known) == "known"
    for _ in range(WRONG_KEYS):
        with pytest.raises(GatewayError, match="does not know"):
            name_of(generate_key())
    num_hashes()
    for presented in (generate_key(), generate_key(), old):
        with pytest.raises(GatewayError, match="Too many wrong"):
            name_of(presented)
    assert (name_of(known), name_of(new)) == ("known", "new")
    assert num_hashes() <= 20
    assert name_of(old, "192.0.2.2") == "old"


def test_no_key_and_no_hash_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    line = key_file_line("me", KEY)
    ring = KeyRing([OTHER, "short-key"], key_file=key_file(tmp_path, "# team keys", "", line, mode=0o644))
    assert ring.authenticate(KEY) == Principal(owner=owner_of(KEY), name="me")
    with pytest.raises(GatewayError) as caught:
        ring.authenticate("nearly-right-secret")
    shown = f"{ring!r} {ring.authenticate(KEY)!r} {caught.value!r} {caught.value} {caplog.text}"
    for secret in (KEY, OTHER, "short-key", "nearly-right-secret", *line.split("$")[1:]):
        assert secret not in shown
    assert "KeyRing(num_keys=3)" in shown


WRONG_ENDS = ":admin|:|:operator:operator| operator|:owner=local|:owner=k_12|:disabled:disabled|:mib=1".split(
    "|"
)
WRONG_ENDS += [":stored-mib=-1", ":stored-mib=x", ":stored-mib=", ":stored-mib=1:stored-mib=2"]
WRONG_HEADS = ("me:md5$aa", "me:sha256$aaa", "me:sha256$zz", "a b:sha256$aa", ":sha256$aa")


@pytest.mark.parametrize(
    "line",
    [
        f"me:{KEY}",
        "me:sha256$aa$bb",
        *(f"{head}${'b' * 64}" for head in WRONG_HEADS),
        *(key_file_line("me", KEY) + end for end in WRONG_ENDS),
        key_file_line("me", KEY)
        + f":owner=k_{'0' * 32}",  # it names its owner already, so it may not name another one
        "me:no-key",
    ],
)
def test_a_malformed_line_stops_the_start_and_stays_secret(tmp_path: Path, line: str) -> None:
    """The error has the line's number, not its text: it may be a key in plain text."""
    path = key_file(tmp_path, key_file_line("me", OTHER), line)
    with pytest.raises(StartupError, match=f"{path}, line 2, ") as caught:
        KeyRing(key_file=path)
    assert KEY not in str(caught.value)


def test_keys_come_from_either_header() -> None:
    given: list[tuple[dict[str, str], str | None]] = [
        ({"authorization": "bearer   k1 "}, "k1"),
        ({"x-api-key": " k2 "}, "k2"),
        ({"Authorization": "Bearer k1", "X-API-Key": "k2"}, "k1"),
        ({"Authorization": "Basic dTpw", "x-api-key": "k2"}, "k2"),
    ]
    given += [(headers, None) for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "k1"})]
    for headers, key in (*given, ({"x-api-key": ""}, None)):
        assert extract_key(CIMultiDict(headers)) == key, headers


def test_a_mistake_does_not_open_the_server(tmp_path: Path) -> None:
    """An empty key, and a key file that is missing, binary or has no key, are refused rather than taken for "no keys"."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    bad = (tmp_path / "missing", tmp_path, tmp_path / "pipe", binary, key_file(tmp_path, "# nobody yet", ""))
    for path in bad:
        with pytest.raises(StartupError, match="key file"):
            KeyRing(key_file=path)
    for key in ("", "  ", "x" * 513):
        with pytest.raises(StartupError, match="API key"):
            KeyRing([KEY, key])


def test_a_key_file_may_come_from_an_editor_of_windows(tmp_path: Path) -> None:
    path = key_file(tmp_path, "")
    path.write_bytes(b"\xef\xbb\xbf" + key_file_line("ada", KEY).encode() + b"\r\n")
    assert KeyRing(key_file=path).authenticate(KEY).name == "ada"


def test_the_table_of_errors_is_that_of_the_protocol() -> None:
    """No code of docs/protocol.md is missing, none is made up, and those may be sent again of which it says so."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    documented = re.search(r"## Error codes\n(.*?)\n\n", text, re.DOTALL)
    assert documented is not None
    assert set(re.findall(r"`(\w+)`", documented[1])) | {"starting"} == set(KINDS)
    retryable = {code for code in KINDS if GatewayError(code, "x").retryable}
    assert retryable == {*re.findall(r"`(\w+)` \(retryable", text), "starting"}
    assert GatewayError("internal", "x", retryable=True).retryable


def test_a_file_that_is_read_again_names_who_is_shut_out_and_changes_roles_of_who_stays(
    tmp_path: Path,
) -> None:
    """Only owners who were let in are named: nobody else has anything to lose. Another name or role is the same owner."""
    mine, theirs, third = key_file_line("slow", KEY), key_file_line("them", OTHER), generate_key()
    unused = key_file_line("unused", generate_key())
    ring = ring_of(tmp_path, mine, theirs, unused, weights={"fast": 4.0})
    me, them = ring.authenticate(KEY), ring.authenticate(OTHER)
    key_file(tmp_path, mine.replace("slow:", "fast:") + ":operator", key_file_line("new", third))
    entries = ring.read()
    assert ring.authenticate(OTHER) == them, "reading alone changes nothing"
    assert {key.owner for key in ring.take_over(entries)} == {them.owner}
    assert is_refused(ring, OTHER) and ring.authenticate(third).name == "new"
    now = ring.current(me)
    assert (now.owner, now.name, now.weight, now.is_operator) == (me.owner, "fast", 4.0, True)
    assert (me.weight, me.is_operator) == (1.0, False)
    with pytest.raises(GatewayError, match="withdrawn") as caught:
        ring.current(them)
    assert caught.value.code == "unauthorized"
    assert ring.take_over(ring.read()) == frozenset()


def test_keys_of_one_person_have_one_owner_and_a_lost_one_takes_nothing_along(tmp_path: Path) -> None:
    """A line of an earlier version goes on as it is, and names its owner from the key; the line of the key that replaces it names that owner."""
    new, third = generate_key(), generate_key()
    ring = ring_of(tmp_path, old_line("ada", KEY), line_for("ada", third, owner=owner_of(KEY)).text)
    first, second = ring.authenticate(KEY), ring.authenticate(third)
    assert first == second and first.owner == owner_of(KEY) and first.key != second.key
    key_file(tmp_path, line_for("ada", new, owner=owner_of(KEY)).text)
    assert sorted(ring.take_over(ring.read())) == sorted(
        Withdrawn(key.key, owner_of(KEY), "ada", is_last=False) for key in (first, second)
    )
    assert is_refused(ring, KEY) and is_refused(ring, third)
    assert ring.authenticate(new).owner == owner_of(KEY)
    assert ring.people() == {owner_of(KEY): "ada"}
    key_file(tmp_path, line_for("ada", new, owner=owner_of(OTHER)).text)
    (moved,) = ring.take_over(ring.read())
    assert moved.owner == owner_of(KEY), (
        "what is open with a key ends when its line is given to another person"
    )
    assert ring.authenticate(new).owner == owner_of(OTHER)


def test_who_is_disabled_is_refused_and_the_server_stays_closed(tmp_path: Path) -> None:
    line = key_file_line("ada", KEY, is_operator=True)
    ring = ring_of(tmp_path, line)
    ring.authenticate(KEY)
    key_file(tmp_path, line + ":disabled", f"bob:no-key:owner={owner_of(OTHER)}")
    (lost,) = ring.take_over(ring.read())
    assert lost == (owner_of(KEY), owner_of(KEY), "ada", True)
    with pytest.raises(GatewayError, match="disabled") as caught:
        ring.authenticate(KEY)
    assert caught.value.code == "unauthorized"
    assert not ring.is_open and not ring.has_operator
    assert is_refused(ring, OTHER) and is_refused(ring, "") and is_refused(ring, None)
    assert ring.people() == {owner_of(KEY): "ada", owner_of(OTHER): "bob"}
    key_file(tmp_path, line)
    assert ring.take_over(ring.read()) == frozenset() and ring.authenticate(KEY).is_operator


def test_operators(tmp_path: Path) -> None:
    from_file = ring_of(tmp_path, key_file_line("op", KEY, is_operator=True), key_file_line("me", OTHER))
    for ring in (from_file, KeyRing([OTHER], operator_keys=[KEY])):
        assert ring.has_operator and ring.is_operator(ring.authenticate(KEY))
        assert not ring.is_operator(ring.authenticate(OTHER))
    both = KeyRing([KEY], operator_keys=[KEY])
    assert both.is_operator(both.authenticate(KEY)), "who has it twice has the larger role"
    assert not KeyRing([KEY]).has_operator and KeyRing().is_operator(LOCAL)


class Counted(Metrics):
    def __init__(self) -> None:
        super().__init__(CollectorRegistry())

    def num_refused(self, budget: str) -> float:
        return self.registry.get_sample_value("overture_requests_refused_total", {"budget": budget}) or 0.0


def test_a_bucket_holds_a_burst_and_then_fills_at_its_rate() -> None:
    rates = Rates(per_s=2, burst=3)
    assert [rates.take("a", 0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert rates.take("a", 0.4) == pytest.approx(0.1)
    assert rates.take("a", 0.5) == 0 and rates.take("a", 0.5) == 0.5
    assert [rates.take("a", 100.0) for _ in range(4)] == [0, 0, 0, 0.5]


def test_names_are_forgotten_before_they_take_memory_and_the_busiest_last() -> None:
    rates = Rates(per_s=1, burst=5, max_names=10)
    for _ in range(5):
        rates.take("busy", 0.0)
    for number in range(1000):
        rates.take(f"n{number}", 0.0)
        assert len(rates) <= 10
    assert rates.take("busy", 0.0) == 1


def test_a_persons_own_limits_go_before_the_servers() -> None:
    own = {"a": PersonLimits(requests_per_min=2, concurrent_requests=2), "free": PersonLimits(0, 0)}
    clock = Clock()
    found = Counted()
    budgets = RequestBudgets(
        found,
        per_min=1,
        max_concurrent=1,
        limits_of=lambda owner: own.get(owner, PersonLimits()),
        clock=clock,
    )

    def num_asked(owner: str) -> int:
        for number in range(5):
            try:
                budgets.ask(owner)
            except GatewayError as error:
                assert error.code == "rate_limited" and error.retry_after_s is not None
                return number
        return 5

    assert [num_asked(owner) for owner in ("a", "other", "free")] == [2, 1, 5]
    clock.now_s += 30
    assert [num_asked(owner) for owner in ("a", "other")] == [1, 0]
    with pytest.raises(
        GatewayError, match=r"2 times a minute.*wait 30 s.*an operator set this limit for you"
    ):
        budgets.ask("a")
    with pytest.raises(GatewayError, match="--max-requests-per-min"):
        budgets.ask("other")
    for owner in ("a", "a", "other", "free", "free"):
        budgets.enter(owner)
    with pytest.raises(GatewayError, match=r"2 requests with this key.*an operator set"):
        budgets.enter("a")
    with pytest.raises(GatewayError, match="--max-concurrent-requests"):
        budgets.enter("other")
    assert found.num_refused("rate") == 6 and found.num_refused("concurrency") == 2


def test_limits_stand_on_lines_and_are_followed(tmp_path: Path) -> None:
    line = key_file_line("ada", KEY) + ":tokens-per-day=5:stored-mib=0"
    bob = old_line("bob", OTHER) + ":requests-per-min=3"
    ring = ring_of(tmp_path, line, bob)
    assert ring.limits_of(owner_of(KEY)) == PersonLimits(tokens_per_day=5, stored_mib=0)
    assert ring.limits_of(owner_of(OTHER)) == PersonLimits(), "whose it is only the key tells"
    ring.authenticate(OTHER)
    assert ring.limits_of(owner_of(OTHER)) == PersonLimits(requests_per_min=3)
    key_file(tmp_path, key_file_line("ada", KEY), bob)
    entries = ring.read()
    ring.take_over(entries)
    assert ring.limits_of(owner_of(KEY)) == PersonLimits()
    assert ring.limits_of(owner_of(OTHER)) == PersonLimits(requests_per_min=3)


def test_a_place_is_given_back_once() -> None:
    found = Counted()
    budgets = RequestBudgets(found, max_concurrent=1, clock=Clock())
    with budgets.enter("a") as place:
        with pytest.raises(GatewayError, match="--max-concurrent-requests") as caught:
            budgets.enter("a")
        assert caught.value.code == "rate_limited" and caught.value.retry_after_s == 2.0
        budgets.enter("b").leave()
        place.leave()
    place.leave()
    with budgets.enter("a"):
        assert found.num_refused("concurrency") == 1
        with pytest.raises(GatewayError):
            budgets.enter("a")


def test_retry_after_is_in_whole_seconds_and_never_too_early() -> None:
    assert [retry_after(wait_s) for wait_s in (0.01, 1.0, 1.2, 29.9)] == [1, 1, 2, 30]
    error = GatewayError("rate_limited", "x", retry_after_s=1.2)
    response = error_reply(make_mocked_request("GET", "/v1/models"), error)
    assert (response.status, response.headers["Retry-After"]) == (429, "2")
    assert to_frame(error)["retry_after_s"] == 1.2


ACTIONS = st.tuples(st.sampled_from(["put", "touch", "drop"]), st.integers(0, 30), st.sampled_from("abcd"))


@given(st.integers(1, 4), st.integers(1, 8), st.lists(ACTIONS, max_size=60))
def test_nothing_is_lost_but_for_room_and_nobody_with_less_loses_to_one_with_more(
    of_one: int, of_all: int, actions: list[tuple[str, int, str]]
) -> None:
    shares: Shares[int] = Shares(of_one, of_all)
    kept: dict[int, str] = {}
    for what, name, client in actions:
        if what == "touch":
            shares.touch(name)
        elif what == "drop" or name in kept:
            shares.drop(name)
            kept.pop(name, None)
        else:
            before = Counter(kept.values())
            loser = shares.put(name, client)
            if loser is not None:
                assert before[client] == of_one or len(kept) == of_all
                assert before[kept[loser]] >= max(before[client], 1)
                del kept[loser]
            kept[name] = client
        num_of = Counter(kept.values())
        assert len(shares) == len(kept) <= of_all
        assert all(shares.num_of(each) == num_of[each] <= of_one for each in "abcd")


async def test_a_call_that_swallows_its_cancellation_ends_all_the_same() -> None:
    calls, is_under_way = OpenCalls(), asyncio.Event()

    async def answers_anyway() -> str:
        async with calls.of(Principal("ann", "ann", key="a")):
            is_under_way.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "an answer"
        return "never"

    task = asyncio.create_task(answers_anyway())
    await is_under_way.wait()
    calls.cut_off("a")
    with pytest.raises(GatewayError, match="withdrawn"):
        await task
