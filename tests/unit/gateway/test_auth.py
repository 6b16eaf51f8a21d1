"""API keys: who gets in, who does not, and that no key shows anywhere. The table of errors is checked here too."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict
from prometheus_client import CollectorRegistry

from gateway.access import auth
from gateway.access.auth import (
    LOCAL,
    KeyRing,
    Principal,
    extract_key,
    generate_key,
    key_file_line,
    owner_of,
    tenant_of,
)
from gateway.access.budgets import WRONG_KEYS, Gatekeeper
from gateway.errors import (
    KINDS,
    CloseCode,
    GatewayError,
    StartupError,
    as_gateway_error,
    to_frame,
    to_openai_body,
)
from gateway.metrics.metrics import Metrics

KEY = "ov-" + "k" * 43
OTHER = "ov-" + "o" * 43


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def is_refused(ring: KeyRing, presented: str | None) -> bool:
    with pytest.raises(GatewayError) as caught:
        ring.authenticate(presented)
    return caught.value.code == "unauthorized"


def test_generated_keys_are_long_and_differ() -> None:
    """256 random bits behind a prefix by which leaked keys can be found."""
    keys = {generate_key() for _ in range(100)}
    assert len(keys) == 100 and all(re.fullmatch(r"ov-[\w-]{43}", key) for key in keys)


def test_without_keys_everybody_is_local() -> None:
    """Also those that present some key: SDKs insist on sending one."""
    ring = KeyRing()
    assert ring.is_open and ring.authenticate(None) == ring.authenticate("anything") == LOCAL == Principal(
        "local", "local"
    )


def test_each_key_has_its_owner(tmp_path: Path) -> None:
    """The same key is the same owner, wherever it is configured and in whatever order."""
    path = key_file(tmp_path, "# team keys", "", key_file_line("laptop", OTHER))
    ring = KeyRing([KEY], key_file=path)
    assert ring.authenticate(KEY).owner == KeyRing([OTHER, KEY]).authenticate(KEY).owner == owner_of(KEY)
    assert ring.authenticate(OTHER) == Principal(owner=owner_of(OTHER), name="laptop")
    assert owner_of(KEY) != owner_of(OTHER) and KeyRing([OTHER, KEY]).authenticate(KEY) == ring.authenticate(
        KEY
    )


def test_an_owner_id_gives_nothing_away(tmp_path: Path) -> None:
    """It is neither part of the key nor of the hash that the key file has, nor a plain hash of the key."""
    digest = key_file_line("me", KEY).rpartition("$")[2]
    assert re.fullmatch(r"k_[0-9a-f]{32}", owner_of(KEY))
    assert owner_of(KEY)[2:] not in (digest[:32], hashlib.sha256(KEY.encode()).hexdigest()[:32])


@pytest.mark.parametrize(
    "presented",
    [None, "", "wrong", KEY[:-1], KEY + "k", KEY.upper(), " " + KEY, KEY + "\0", "\ud800", "x" * 100_000],
)
def test_any_other_key_is_refused(presented: str | None) -> None:
    """A missing, near, malformed or huge key is `unauthorized`, never a crash."""
    assert is_refused(KeyRing([KEY, OTHER]), presented)


@settings(max_examples=50)
@given(st.text())
def test_no_made_up_key_gets_in(presented: str) -> None:
    """Whatever the text."""
    assert is_refused(KeyRing([KEY]), presented)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: the first key of three costs as many comparisons as the last and as a wrong one."""
    ring = KeyRing([KEY, OTHER, generate_key()])
    calls = []
    monkeypatch.setattr("gateway.access.auth.hmac.compare_digest", lambda a, b: calls.append(a) or a == b)
    ring.authenticate(KEY)
    assert len(calls) == 3
    ring.authenticate(OTHER)
    assert len(calls) == 6
    assert is_refused(ring, "wrong") and len(calls) == 9


@pytest.fixture
def num_hashes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many hashes were compared since the last call."""
    made = []
    digest = auth._digest
    monkeypatch.setattr(auth, "_digest", lambda salt, key: made.append(salt) or digest(salt, key))

    def count() -> int:
        num = len(made)
        made.clear()
        return num

    return count


def old_line(name: str, key: str) -> str:
    """As earlier versions made them, and as the documentation lets anybody make them: with a salt of chance alone."""
    salt = secrets.token_bytes(16)
    return f"{name}:sha256${salt.hex()}${hashlib.sha256(salt + key.encode()).hexdigest()}"


def test_a_key_is_found_in_a_file_of_any_length_with_one_hash(
    tmp_path: Path, num_hashes: Callable[[], int]
) -> None:
    """The first and the last one, one that was taken away, and one that nobody has."""
    keys = [generate_key() for _ in range(500)]
    lines = [key_file_line(f"n{number}", key) for number, key in enumerate(keys)]
    ring = KeyRing(key_file=key_file(tmp_path, *lines))
    num_hashes()
    for number in (0, 499):
        assert ring.authenticate(keys[number]).name == f"n{number}"
    assert num_hashes() <= 4
    assert is_refused(ring, generate_key()) and num_hashes() <= 2
    key_file(tmp_path, *lines[1:])
    assert ring.take_over(ring.read()) == {owner_of(keys[0])}
    assert is_refused(ring, keys[0]) and ring.authenticate(keys[499]).name == "n499"
    assert num_hashes() <= 4


def test_a_key_on_an_older_line_is_looked_for_once(
    tmp_path: Path, num_hashes: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    """And again when the file has changed: it may be an operator's now."""
    keys = [generate_key() for _ in range(100)]
    lines = [old_line(f"n{number}", key) for number, key in enumerate(keys)]
    ring = KeyRing(key_file=key_file(tmp_path, *lines))
    assert "100 lines of the key file are of an earlier version" in caplog.text
    num_hashes()
    for _ in range(3):
        assert ring.authenticate(keys[50]).name == "n50"
    assert 100 <= num_hashes() <= 110
    key_file(tmp_path, *lines, key_file_line("chief", keys[50], is_operator=True))
    assert ring.take_over(ring.read()) == frozenset()
    assert ring.authenticate(keys[50]).is_operator and not ring.authenticate(keys[51]).is_operator


def test_wrong_keys_cannot_make_the_server_look_for_them_without_end(
    tmp_path: Path, num_hashes: Callable[[], int]
) -> None:
    """From one address as many as may be tried at all; keys that were seen, and those on newer lines, get in all the same."""
    old, new, known = generate_key(), generate_key(), generate_key()
    lines = [old_line(f"n{number}", generate_key()) for number in range(2 * auth.MAX_COMPARED)]
    lines += [old_line("old", old), old_line("known", known), key_file_line("new", new)]
    gatekeeper = Gatekeeper(
        KeyRing(key_file=key_file(tmp_path, *lines)), Metrics(CollectorRegistry()), lambda: 0.0
    )
    assert gatekeeper.authenticate(known, "192.0.2.1").name == "known"
    for _ in range(WRONG_KEYS):
        with pytest.raises(GatewayError, match="does not know"):
            gatekeeper.authenticate(generate_key(), "192.0.2.1")
    num_hashes()
    for presented in (generate_key(), generate_key(), old):
        with pytest.raises(GatewayError, match="Too many wrong"):
            gatekeeper.authenticate(presented, "192.0.2.1")
    assert gatekeeper.authenticate(known, "192.0.2.1").name == "known"
    assert gatekeeper.authenticate(new, "192.0.2.1").name == "new"
    assert num_hashes() <= 10
    assert gatekeeper.authenticate(old, "192.0.2.2").name == "old"


def test_no_key_and_no_hash_shows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a repr, not in the log, not in an error."""
    caplog.set_level(logging.DEBUG)
    line = key_file_line("me", KEY)
    ring = KeyRing([OTHER, "short-key"], key_file=key_file(tmp_path, line, mode=0o644))
    with pytest.raises(GatewayError) as caught:
        ring.authenticate("nearly-right-secret")
    shown = (
        f"{ring!r} {ring._entries!r} {ring.authenticate(KEY)!r} {caught.value!r} {caught.value} {caplog.text}"
    )
    for secret in (KEY, OTHER, "short-key", "nearly-right-secret", *line.split("$")[1:]):
        assert secret not in shown
    assert "KeyRing(num_keys=3)" in shown


def test_a_guessable_key_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """It works, and the log says which one it is by a name made from its owner."""
    ring = KeyRing(["test"])
    assert f"API key {ring.authenticate('test').name} has only 4 characters" in caplog.text


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_file_that_all_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    """The hashes in it are of no use to a reader, but nobody else has business there."""
    KeyRing(key_file=key_file(tmp_path, key_file_line("me", KEY), mode=mode))
    assert ("chmod o-r" in caplog.text) == is_warned


def test_one_key_twice_in_a_file_shows_two_hashes() -> None:
    """Each line has a salt of its own."""
    assert key_file_line("me", KEY) != key_file_line("me", KEY)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "x" * 65])
def test_a_bad_name_is_refused(name: str) -> None:
    """It would not be read back."""
    with pytest.raises(ValueError, match="1 to 64"):
        key_file_line(name, KEY)


@pytest.mark.parametrize(
    "line",
    [
        KEY,
        f"me:{KEY}",
        "me:sha256$aa",
        "me:sha256$aa$bb",
        f"me:md5$aa${'b' * 64}",
        f"me:sha256$aaa${'b' * 64}",
        f"me:sha256$zz${'b' * 64}",
        f"a b:sha256$aa${'b' * 64}",
        f":sha256$aa${'b' * 64}",
    ],
)
def test_a_malformed_line_stops_the_start_and_stays_secret(tmp_path: Path, line: str) -> None:
    """The error has the line's number, not its text: it may be a key in plain text."""
    path = key_file(tmp_path, key_file_line("me", OTHER), line)
    with pytest.raises(StartupError, match=f"{path}, line 2, ") as caught:
        KeyRing(key_file=path)
    assert KEY not in str(caught.value)


def test_a_mistake_does_not_open_the_server(tmp_path: Path) -> None:
    """An empty key, and a key file that is missing, binary or has no key, are refused rather than taken for "no keys"."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    files = [tmp_path / "missing", tmp_path, binary, key_file(tmp_path, "# nobody yet", "")]
    for path in files:
        with pytest.raises(StartupError, match="key file"):
            KeyRing(key_file=path)
    for key in ("", "  ", "x" * 513):
        with pytest.raises(StartupError, match="API key"):
            KeyRing([KEY, key])


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"Authorization": "Bearer k1"}, "k1"),
        ({"authorization": "bearer   k1 "}, "k1"),
        ({"x-api-key": " k2 "}, "k2"),
        ({"Authorization": "Bearer k1", "X-API-Key": "k2"}, "k1"),
        ({"Authorization": "Basic dTpw", "x-api-key": "k2"}, "k2"),
        ({"Authorization": "Bearer", "x-api-key": "k2"}, "k2"),
        ({"Authorization": "Bearer "}, None),
        ({"Authorization": "k1"}, None),
        ({"Authorization": "Basic dTpw"}, None),
        ({"x-api-key": ""}, None),
    ],
)
def test_keys_come_from_either_header(headers: dict[str, str], key: str | None) -> None:
    """A bearer token first, then the header that Anthropic clients send."""
    assert extract_key(CIMultiDict(headers)) == key


# --- errors --------------------------------------------------------------------------------------------------------------------------


def test_the_table_has_the_codes_of_the_protocol() -> None:
    """No code of docs/protocol.md is missing, none is made up."""
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    documented = re.search(r"## Error codes\n(.*?)\n\n", text, re.DOTALL)
    assert documented is not None
    assert set(re.findall(r"`(\w+)`", documented[1])) | {"starting"} == set(KINDS)


def test_retryable_is_what_the_protocol_says() -> None:
    """And a single error may say otherwise."""
    retryable = {code for code in KINDS if GatewayError(code, "x").retryable}
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    documented = re.findall(r"`(\w+)` \(retryable", text)
    assert retryable == {*documented, "starting"}
    assert GatewayError("internal", "x", retryable=True).retryable


def test_an_unknown_code_is_a_mistake_in_the_program() -> None:
    """It is not sent to anybody."""
    with pytest.raises(ValueError, match="teapot"):
        GatewayError("teapot", "x")


def test_the_three_forms_of_an_error() -> None:
    """HTTP body, socket frame and close code."""
    error = GatewayError("unknown_model", "No such model.", param="model")
    assert to_openai_body(error) == {
        "error": {
            "message": "No such model.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    frame = {"type": "error", "code": "unknown_model", "message": "No such model.", "retryable": False}
    assert to_frame(error) == frame and to_frame(error, "t1") == {**frame, "id": "t1"}
    assert (error.http_status, error.close_code) == (404, None)
    assert GatewayError("unauthorized", "x").close_code is CloseCode.UNAUTHORIZED == 4401


def test_clients_see_no_detail_of_other_exceptions() -> None:
    """A GatewayError passes; anything else, and what is meant for the operator, becomes a plain `internal`."""
    known = GatewayError("busy", "x")
    assert as_gateway_error(known) is known
    for error in (KeyError("/etc/passwd"), StartupError("/etc/passwd is damaged")):
        assert as_gateway_error(error).code == "internal" and "passwd" not in as_gateway_error(error).message


def test_tenants() -> None:
    """Every key is one of its own; without keys everybody shares."""
    assert tenant_of(LOCAL.owner) == ""
    assert tenant_of(owner_of("ov-one")) == owner_of("ov-one") != tenant_of(owner_of("ov-two"))


# --- keys that come and go, and operators ---------------------------------------------------------------------------------------------


def test_a_file_that_is_read_again_lets_new_keys_in_and_names_who_is_shut_out(tmp_path: Path) -> None:
    """Only owners who were let in are named: nobody else has anything to lose."""
    mine, theirs, third = key_file_line("me", KEY), key_file_line("them", OTHER), generate_key()
    ring = KeyRing(key_file=key_file(tmp_path, mine, theirs, key_file_line("unused", generate_key())))
    me, them = ring.authenticate(KEY), ring.authenticate(OTHER)
    key_file(tmp_path, mine, key_file_line("new", third))
    entries = ring.read()
    assert ring.authenticate(OTHER) == them, "reading alone changes nothing"
    assert ring.take_over(entries) == {them.owner}
    assert is_refused(ring, OTHER) and ring.authenticate(third).name == "new"
    assert ring.current(me) == me
    with pytest.raises(GatewayError, match="withdrawn") as caught:
        ring.current(them)
    assert caught.value.code == "unauthorized"
    assert ring.take_over(ring.read()) == frozenset()


def test_weights_and_roles_follow_the_file(tmp_path: Path) -> None:
    """A key that changes its name or becomes an operator's is the same owner, with nothing cut off."""
    line = key_file_line("slow", KEY)
    ring = KeyRing(key_file=key_file(tmp_path, line), weights={"fast": 4.0})
    before = ring.authenticate(KEY)
    key_file(tmp_path, line.replace("slow:", "fast:") + ":operator")
    assert ring.take_over(ring.read()) == frozenset()
    after = ring.current(before)
    assert (after.owner, after.name, after.weight, after.is_operator) == (before.owner, "fast", 4.0, True)
    assert (before.weight, before.is_operator) == (1.0, False)


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """Also one that is empty or gone: the server must not open."""
    path = key_file(tmp_path, key_file_line("me", KEY))
    ring = KeyRing(key_file=path)
    for break_it in (lambda: key_file(tmp_path, "x"), lambda: key_file(tmp_path), lambda: path.unlink()):
        break_it()
        with pytest.raises(StartupError, match="key file"):
            ring.read()
        assert ring.authenticate(KEY).name == "me" and is_refused(ring, OTHER) and not ring.is_open


def test_operators(tmp_path: Path) -> None:
    """By a word at the line's end or a setting of its own; without keys everybody is one. Other keys are ordinary."""
    operators = key_file(tmp_path, key_file_line("op", KEY, is_operator=True), key_file_line("me", OTHER))
    for ring in (KeyRing(key_file=operators), KeyRing([OTHER], operator_keys=[KEY])):
        assert ring.has_operator and ring.is_operator(ring.authenticate(KEY))
        assert not ring.is_operator(ring.authenticate(OTHER))
    both = KeyRing([KEY], operator_keys=[KEY])
    assert both.is_operator(both.authenticate(KEY)), "who has it twice has the larger role"
    assert not KeyRing([KEY]).has_operator and KeyRing().is_operator(LOCAL)


@pytest.mark.parametrize("end", [":admin", ":", ":operator:operator", " operator", "operator"])
def test_an_unknown_role_is_a_mistake(tmp_path: Path, end: str) -> None:
    """It is not taken for an ordinary key, which its writer did not mean."""
    with pytest.raises(StartupError, match="line 1"):
        KeyRing(key_file=key_file(tmp_path, key_file_line("me", KEY) + end))
