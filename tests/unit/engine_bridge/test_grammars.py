"""The helper processes for grammars: real ones, with a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Iterator

import llguidance
import pytest

from engine_bridge.grammars.checker import GrammarChecker, GrammarTokenizer, HelperProcess
from engine_bridge.grammars.messages import UNREADABLE
from engine_bridge.grammars.worker import Setup
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
    defs: dict[str, object] = {
        f"d{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(num)
    }
    return schema({"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        schema({"enum": [f"value {number}" for number in range(5000)]}),
        schema({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(400)}}),
        references(50),
        llguidance.grammar_from("choice", json.dumps([f"choice {number}" for number in range(1000)])),
        llguidance.grammar_from("regex", r"[a-z]{1,100}@[a-z]+\.com"),
        chain(50),
    ],
    ids=["schema", "enum", "properties", "references", "choices", "regex", "rules"],
)
async def test_grammars_that_people_write_are_accepted(checker: GrammarChecker, grammar: str) -> None:
    assert await checker.check(grammar, "") == ""
    assert checker.num_deaths == 0


@pytest.mark.parametrize("grammar", [chain(5000), chain(50_000), references(1000)], ids=["5k", "50k", "refs"])
async def test_a_grammar_that_overflows_the_stack_ends_its_helper_process_and_nothing_else(
    checker: GrammarChecker, grammar: str
) -> None:
    assert "too deeply" in await checker.check(grammar, "")
    assert checker.num_deaths == 1
    assert await checker.check(schema({"type": "object"}), "") == ""


async def test_a_grammar_that_fails_after_some_tokens_is_refused_beforehand(checker: GrammarChecker) -> None:
    choices = llguidance.grammar_from("choice", json.dumps([f"choice {number}" for number in range(10_000)]))
    assert "items" in await checker.check(choices, "")
    assert checker.num_deaths == 0


async def test_a_malformed_grammar_is_refused_with_the_compilers_own_words(checker: GrammarChecker) -> None:
    assert "Expected" in await checker.check(llguidance.grammar_from("grammar", "start: ("), "")


async def test_a_verdict_is_reached_once_for_equal_grammars(checker: GrammarChecker) -> None:
    grammar = chain(5000)
    reasons = await asyncio.gather(*(checker.check(grammar, "same tenant") for _ in range(5)))
    assert len(set(reasons)) == 1
    assert (checker.num_checked, checker.num_deaths) == (1, 1)


async def test_a_check_that_was_cut_short_is_tried_again_later(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been the machine's fault, where a crash is the grammar's."""
    # One that takes a moment: a small one may be answered before the time is looked at.
    grammar = schema({"enum": [f"value {number}" for number in range(20_000)]})
    monkeypatch.setattr("engine_bridge.grammars.checker.UNSURE_S", -1.0)
    with monkeypatch.context() as hurry:
        hurry.setattr(checker, "_timeout_s", 0.0)
        assert "takes longer than" in await checker.check(grammar, "")
    assert await checker.check(grammar, "") == ""


async def test_who_leaves_while_a_check_runs_waits_for_it_with_the_next_one(checker: GrammarChecker) -> None:
    slow = schema({"enum": [f"value {number}" for number in range(100_000)]})
    leaving = asyncio.create_task(checker.check(slow, "a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    assert await checker.check(schema({"type": "object"}), "a") == ""
    assert checker.num_checked == 2, "the first one was not cut short, and was done before the second"


async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_replaced() -> None:
    # Far less time than compiling this one takes on any machine.
    checker = GrammarChecker(BYTES, timeout_s=0.001, memory_mib=512)
    slow = schema({"enum": [f"value {number}" for number in range(200_000)]})
    assert "takes longer than" in await checker.check(slow, "")
    checker.close()


async def test_a_process_that_was_killed_is_replaced() -> None:
    setup = Setup("byte", None, None, 1 << 29, 60.0)
    helper = HelperProcess(setup)
    helper.start()
    assert helper._process is not None
    first = helper._process.pid
    os.kill(first, signal.SIGKILL)
    helper._process.wait()
    assert helper.ask(schema({"type": "object"}).encode(), 30.0) == ""
    assert helper._process.pid != first
    helper.close()


async def test_without_a_usable_tokenizer_the_request_may_be_tried_again_and_nothing_is_remembered() -> None:
    checker = GrammarChecker(GrammarTokenizer("no tokenizer at all"), timeout_s=5.0, memory_mib=512)
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await checker.check(schema({"type": "object"}), "")
    checker.close()


async def test_a_slow_check_of_one_tenant_does_not_delay_another_tenants(checker: GrammarChecker) -> None:
    slow = schema({"enum": [f"value {number}" for number in range(100_000)]})
    waiting = [
        asyncio.create_task(checker.check(slow.replace("value 7", f"v{number}"), "a")) for number in range(8)
    ]
    assert await checker.check(schema({"type": "object"}), "b") == ""
    assert sum(task.done() for task in waiting) < len(waiting)
    await asyncio.gather(*waiting)


class DeafHelper:
    """Stops a checker's helper processes in the middle of their work: they neither read nor answer nor end."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker

    def stop_all(self) -> None:
        for helper in self._checker._processes:
            helper.start()
            assert helper._process is not None
            os.kill(helper._process.pid, signal.SIGSTOP)


async def test_a_helper_that_does_not_read_is_replaced_and_structured_output_goes_on() -> None:
    # More than a socket holds, so that it cannot even be written.
    large = schema({"enum": [f"value {number}" for number in range(50_000)]})
    checker = GrammarChecker(BYTES, timeout_s=2.0, memory_mib=512)
    DeafHelper(checker).stop_all()
    async with asyncio.timeout(100):
        reasons = await asyncio.gather(checker.check(large, "a"), checker.check(large, "b"))
        assert all("takes longer than" in reason for reason in reasons)
        assert await checker.check(schema({"type": "object"}), "a") == ""
        assert await checker.check(schema({"type": "object"}), "b") == ""
    checker.close()


async def test_what_one_tenant_has_asked_is_neither_known_nor_held_against_another(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = schema({"enum": [f"value {number}" for number in range(20_000)]})
    with monkeypatch.context() as hurry:
        hurry.setattr(checker, "_timeout_s", 0.0)
        assert "takes longer than" in await checker.check(grammar, "a")
    assert "takes longer than" in await checker.check(grammar, "a"), "is not tried again for a while"
    assert await checker.check(grammar, "b") == ""
    num_checked = checker.num_checked
    assert await checker.check(grammar, "b") == ""
    assert checker.num_checked == num_checked
    assert await checker.check(grammar, "c") == ""
    assert checker.num_checked == num_checked + 1, "an answer at once would tell that somebody had asked it"


async def test_many_tenants_and_grammars_are_forgotten_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_bridge.grammars.checker.MAX_TENANTS", 3)
    monkeypatch.setattr("engine_bridge.grammars.checker.MAX_REMEMBERED", 2)
    for number in range(5):
        assert await checker.check(schema({"type": "object"}), f"tenant {number}") == ""
        assert await checker.check(schema({"const": number}), "tenant 4") == ""
    assert len(checker._tenants) == 3
    assert len(checker._tenants["tenant 4"]._verdicts) == 2


async def test_a_helper_that_dies_of_earlier_grammars_is_not_held_against_the_next_one(
    checker: GrammarChecker,
) -> None:
    small = schema({"type": "object"})
    for tenant in ("a", "b"):
        assert await checker.check(small, tenant) == ""
    for helper in checker._processes:
        if helper._process is not None:
            helper.has_worked = True
            # As if the memory that earlier grammars have left there were all that it may have.
            resource.prlimit(helper._process.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
    large = schema({"enum": [f"value {number}" for number in range(20_000)]})
    assert await checker.check(large, "c") == ""


async def test_the_one_whose_grammar_ends_a_helper_waits_for_the_next_helper(
    checker: GrammarChecker,
) -> None:
    assert "too deeply" in await checker.check(chain(5000), "a")
    processes = [helper._process for helper in checker._processes if helper._process is not None]
    assert processes and all(process.poll() is None for process in processes)


async def test_what_the_compiler_says_of_its_own_code_is_not_for_clients(checker: GrammarChecker) -> None:
    lazy = llguidance.grammar_from("lark", 'start: a "x"\na[lazy]: /.*/\n')
    assert await checker.check(lazy, "") == UNREADABLE
