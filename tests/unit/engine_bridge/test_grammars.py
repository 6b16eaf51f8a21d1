import asyncio
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator

import llguidance
import pytest

from engine_bridge.grammars.checker import GrammarChecker
from engine_bridge.grammars.messages import UNREADABLE
from engine_bridge.grammars.worker import GrammarTokenizer
from engine_bridge.protocol.errors import EngineUnavailable

BYTES = GrammarTokenizer("byte")


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(BYTES, timeout_s=30.0, memory_mib=512)
    yield made
    made.close()


def chain(num_rules: int) -> str:
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(num_rules))
    return llguidance.grammar_from("grammar", f'start: r0\n{rules}\nr{num_rules}: "b"\n')


def schema(value: object) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value))


def references(num: int) -> str:
    links = ({"x": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(num))
    defs = {f"d{number}": {"type": "object", "properties": link} for number, link in enumerate(links)}
    return schema({"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def values(num: int) -> str:
    return schema({"enum": [f"value {number}" for number in range(num)]})


SMALL = schema({"type": "object"})


CHOICES = [f"choice {number}" for number in range(10_000)]
# By what they are: the grammar, and words of the reason for which it is refused; a lazy one fails only after some tokens.
GRAMMARS = {
    "schema": (schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), ""),
    "enum": (values(5000), ""),
    "properties": (schema({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(400)}}), ""),
    "references": (references(50), ""),
    "choices": (llguidance.grammar_from("choice", json.dumps(CHOICES[:1000])), ""),
    "regex": (llguidance.grammar_from("regex", r"[a-z]{1,100}@[a-z]+\.com"), ""),
    "rules": (chain(50), ""),
    "too many choices": (llguidance.grammar_from("choice", json.dumps(CHOICES)), "items"),
    "no grammar": (llguidance.grammar_from("grammar", "start: ("), "Expected"),
    "the compiler's own code": (llguidance.grammar_from("lark", 'start: a "x"\na[lazy]: /.*/\n'), UNREADABLE),
}  # fmt: skip


async def test_grammars_are_accepted_or_refused_in_its_words(checker: GrammarChecker) -> None:
    for what, (grammar, words) in GRAMMARS.items():
        reason = await checker.check(grammar, "")
        assert words in reason and bool(reason) == bool(words), what
    assert checker.num_deaths == 0


async def test_without_a_usable_tokenizer_the_request_may_be_tried_again_and_nothing_is_remembered() -> None:
    checker = GrammarChecker(GrammarTokenizer("no tokenizer at all"), timeout_s=5.0, memory_mib=512)
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await checker.check(SMALL, "")
    checker.close()


async def test_a_tenants_checks_wait_for_each_other_though_it_leaves_and_delay_no_other_tenants(
    checker: GrammarChecker,
) -> None:
    for helper in checker.processes:
        helper.start()
    slow = checker.processes[0].pid
    assert slow is not None
    os.kill(slow, signal.SIGSTOP)
    leaving = asyncio.create_task(checker.check(values(1), "a"))
    while not checker._tenants:
        await asyncio.sleep(0)
    leaving.cancel()
    waiting = [asyncio.create_task(checker.check(values(number), "a")) for number in (2, 3)]
    for number in (4, 5):
        assert await checker.check(values(number), "b") == ""
    assert not any(task.done() for task in waiting)
    os.kill(slow, signal.SIGCONT)
    assert await asyncio.gather(*waiting) == ["", ""]
    assert checker.num_checked == 5, "the first one was not cut short"


async def test_a_helper_that_does_not_read_is_replaced_and_structured_output_goes_on() -> None:
    checker = GrammarChecker(BYTES, timeout_s=2.0, memory_mib=512)
    for helper in checker.processes:  # in the middle of their work they neither read nor answer nor end
        helper.start()
        os.kill(helper.pid, signal.SIGSTOP)
    # More than a socket holds, so that it cannot even be written.
    large = values(30_000)
    async with asyncio.timeout(100):
        reasons = await asyncio.gather(checker.check(large, "a"), checker.check(large, "b"))
        assert all("takes longer than" in reason for reason in reasons)
        assert [await checker.check(SMALL, tenant) for tenant in ("a", "b")] == ["", ""]
    checker.close()


async def test_no_verdict_tells_of_others(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = values(10_000)
    with monkeypatch.context() as hurry:
        hurry.setattr(checker, "_timeout_s", 0.0)
        assert "takes longer than" in await checker.check(grammar, "a")
    assert "takes longer than" in await checker.check(grammar, "a"), "is not tried again for a while"
    # An answer at once would tell a tenant that another one had asked it.
    for tenant, num_more in (("b", 1), ("b", 0), ("c", 1)):
        num_checked = checker.num_checked
        assert await checker.check(grammar, tenant) == ""
        assert checker.num_checked == num_checked + num_more
    monkeypatch.setattr("engine_bridge.grammars.checker.UNSURE_S", -1.0)
    with monkeypatch.context() as hurry:
        hurry.setattr(checker, "_timeout_s", 0.0)
        assert "takes longer than" in await checker.check(grammar, "d")
    assert await checker.check(grammar, "d") == "", "the time may have been the machine's fault"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def starve(pid: int) -> None:
    """As if the memory that earlier grammars have left there were all that it may have."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


@pytest.mark.parametrize("end", [kill, starve])
async def test_a_helper_that_was_killed_or_dies_of_earlier_grammars_is_replaced_for_the_next_one(
    checker: GrammarChecker, end: Callable[[int], None]
) -> None:
    for tenant in ("a", "b"):
        assert await checker.check(SMALL, tenant) == ""
    ended = [helper for helper in checker.processes if helper.pid is not None]
    pids = [helper.pid for helper in ended]
    for helper in ended:
        helper.has_worked = True
        end(helper.pid)
    for tenant, num in (("a", 10), ("c", 5000), ("d", 5001)):
        assert await checker.check(values(num), tenant) == ""
    assert end is starve or any(helper.pid not in (*pids, None) for helper in checker.processes)


def test_a_checker_that_is_closed_while_its_helpers_start_reports_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = GrammarChecker(BYTES, timeout_s=30.0, memory_mib=512)
    made.warm_up()
    while not any(process.pid for process in made.processes):
        pass
    made.close()
    made._threads.shutdown(wait=True)
    assert not caplog.records
