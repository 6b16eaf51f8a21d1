"""Grammars and schemas that cost their compiler or matcher much."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.live.attacks.attacker import HELLO, MODEL, Attack, Attacker, Outcome
from bench.live.attacks.bodies import fields


def rule_chain(num: int) -> str:
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(num))
    return f'start: r0\n{rules}\nr{num}: "b"\n'


def ebnf_chain(num: int) -> str:
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(num))
    return f'root ::= r0\n{rules}\nr{num} ::= "b"\n'


def reference_chain(num: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"d{number}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/d{number + 1}"}},
            "required": ["x"],
        }
        for number in range(num)
    }
    return {"$defs": defs | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def all_of(num: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"type": "object", "properties": {f"p{number}": {"type": "string"}}} for number in range(num)
        ]
    }


def nested(num: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num):
        schema = {"type": "array", "items": schema}
    return schema


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def grammar(text: str, **more: Any) -> Attack:
    return fields(lambda: {"structured_outputs": {"grammar": text}} | more)


def structured(**structured_outputs: Any) -> Attack:
    return fields(lambda: {"structured_outputs": structured_outputs})


def schema(value: Any) -> Attack:
    return fields(lambda: {"response_format": json_schema(value)})


async def schema_in_responses(attacker: Attacker) -> Outcome:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": all_of(10_000)}}
    body = {"model": MODEL, "input": "Hello!", "max_output_tokens": 16, "text": text, "store": False}
    return [await attacker.post("/v1/responses", body | {"stream": is_stream}) for is_stream in (False, True)]


async def schema_in_messages(attacker: Attacker) -> Outcome:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 16}
    config = {"format": {"type": "json_schema", "schema": all_of(10_000)}}
    return [await attacker.post("/v1/messages", body | {"output_config": config})]


async def chain_in_streams(attacker: Attacker) -> Outcome:
    body = {"structured_outputs": {"grammar": rule_chain(1500)}, "stream": True}
    return list(await asyncio.gather(*(attacker.chat(**body) for _ in range(8))))


async def many_slow_grammars(attacker: Attacker) -> Outcome:
    """Then a harmless one, which must still be answered."""
    slow = [{"enum": [f"{number}-{value}" for value in range(9000)]} for number in range(6)]
    calls = [attacker.chat(response_format=json_schema(each)) for each in slow]
    return [*await asyncio.gather(*calls), await attacker.chat(response_format={"type": "json_object"})]


AMBIGUOUS = 'start: a\na: a a | a a a | "x"'
MORE_AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "" | "x" | "y"'


async def ambiguous_often(attacker: Attacker) -> Outcome:
    return await grammar(MORE_AMBIGUOUS, max_tokens=400, n=16)(attacker)


async def evil_tools(attacker: Attacker) -> Outcome:
    tool = {"type": "function", "function": {"name": "f", "parameters": reference_chain(1000)}}
    choice = {"type": "function", "function": {"name": "f"}}
    return [
        await attacker.chat(tools=[tool], tool_choice="required"),
        await attacker.chat(tools=[tool], tool_choice=choice),
    ]


async def many_triggers(attacker: Attacker) -> Outcome:
    """Each is compared with each structure."""
    tag = {
        "triggers": [f"<{number}" for number in range(5000)],
        "structures": [{"begin": f"<{4999 - number}>", "schema": {}, "end": "</>"} for number in range(1000)],
    }
    return [await attacker.chat(structured_outputs={"structural_tag": json.dumps(tag)})]


async def in_the_background(attacker: Attacker) -> Outcome:
    """Stored or not, as vLLM's two checks of it read the word."""
    text = {"format": {"type": "json_schema", "name": "x", "schema": reference_chain(300)}}
    body = {"model": MODEL, "input": "Hello!", "background": True, "text": text}
    return [await attacker.post("/v1/responses", body | {"store": store}) for store in (True, False, "false")]
