"""The audit log: who did what, when and from where, without a text or a key, and bounded where strangers write it."""

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway.access.auth import generate_key
from gateway.access.key_file import key_file_line, owner_of
from gateway.people.audit import REFUSED_BURST, REFUSED_BURST_OF_ALL, REFUSED_PER_S, AuditLog, Entry

from .front import Gateway, Gateways
from .parts import KEY, OTHER, Clock, key_file, until
from .test_usage import NOON


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def written(gateway: Gateway, folder: Path) -> list[dict[str, Any]]:
    await gateway.server.services.audit.write()
    return await asyncio.to_thread(lines, folder)


async def test_strangers_write_a_few_lines_a_minute_and_what_was_left_out_is_counted(tmp_path: Path) -> None:
    clock = Clock(NOON)
    audit = AuditLog(tmp_path / "audit.jsonl", clock)
    for _ in range(1000):
        audit.refused("192.0.2.1", "wrong")
    clock.now_s += 1 / REFUSED_PER_S
    audit.refused("192.0.2.1", "wrong")
    await audit.write()
    found = lines(tmp_path)
    assert [each.get("num_more", 0) for each in found] == [0] * REFUSED_BURST + [1000 - REFUSED_BURST]
    assert found[0] == {
        "what": "sign_in_refused",
        "at": "2026-11-29T12:00:00Z",
        "from": "192.0.2.1",
        "about": "wrong",
    }
    for number in range(10 * REFUSED_BURST_OF_ALL):
        audit.refused(f"192.0.2.{number}", "wrong")
    await audit.write()
    assert len(lines(tmp_path)) <= REFUSED_BURST_OF_ALL + REFUSED_BURST + 1
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600


async def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to(tmp_path / "elsewhere")
    audit = AuditLog(path)
    audit.note(Entry(what="operator_action", about="first"))
    await audit.write()
    assert not (tmp_path / "elsewhere").exists(), "a link is not followed: it may lead out of the folder"
    path.unlink()
    audit.note(Entry(what="operator_action", about="later"))
    await audit.write()
    assert [each["about"] for each in lines(tmp_path)] == ["first", "later"]


async def test_half_a_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """As a full disk or a power cut leaves it."""
    (tmp_path / "audit.jsonl").write_text('{"what":"signed_')
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.note(Entry(what="operator_action", about="later"))
    await audit.write()
    assert [
        json.loads(line)["about"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()[1:]
    ] == ["later"]


async def test_writing_ends_when_lines_that_another_call_writes_are_there(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    os.mkfifo(path)  # a writer waits until somebody reads
    audit = AuditLog(path)
    audit.note(Entry(what="operator_action"))
    first = asyncio.create_task(audit.write())
    await asyncio.sleep(0)
    second = asyncio.create_task(audit.write())
    done, _ = await asyncio.wait([second], timeout=0.05)
    read = await asyncio.to_thread(path.read_text)
    await asyncio.gather(first, second)
    assert not done and json.loads(read)["what"] == "operator_action"


@pytest.mark.virtual_time
async def test_refusals_operators_and_changes_of_keys_are_noted_without_a_key(
    gateways: Gateways, team: Path, tmp_path: Path
) -> None:
    wrong, third = generate_key(), generate_key()
    mine, theirs = (await asyncio.to_thread(team.read_text)).splitlines()
    gateway = await gateways(api_key_file=team)
    assert (await gateway.call("GET", "/v1/models")).status == 401
    assert (await gateway.call("GET", "/api/sessions", key=wrong)).status == 401
    assert (await gateway.call("POST", "/v1/nodes/local/reopen", key=OTHER)).status == 403
    await gateway.call("POST", "/v1/nodes/local/reopen", key=KEY)
    found = await written(gateway, tmp_path)
    assert [each["what"] for each in found] == ["sign_in_refused", "operator_action"]
    assert (found[1]["who"], found[1]["owner"]) == ("ada", owner_of(KEY))
    assert (found[1]["about"], found[1]["from"]) == ("POST /v1/nodes/local/reopen", "127.0.0.1")
    assert (await gateway.call("GET", "/api/sessions", key=OTHER)).status == 200
    await asyncio.to_thread(key_file, tmp_path, mine, theirs + ":disabled", key_file_line("eve", third))
    gateway.server.services.look_at_keys.set()
    await until(lambda: len(lines(tmp_path)) > 2, 0.1)
    read = lines(tmp_path)[2]
    assert (read["what"], read["from"]) == ("keys_read", "key file")
    assert read["about"] == f"bob {OTHER[:11]} disabled; eve {third[:11]} added"
    refused = await gateway.call("GET", "/api/sessions", key=OTHER)
    assert refused.status == 401 and "disabled" in refused.body["error"]["message"]
    await written(gateway, tmp_path)
    text = (tmp_path / "audit.jsonl").read_text()
    assert not any(key[11:] in text for key in (KEY, OTHER, wrong, third))
