"""Grammars, schemas and regexes for structured answers: to end the process, to hold it, or to fill its memory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bench.live.robustness.attacks.attacker import HELLO, MODEL, Attacker, Outcome, case, chats, sends


def rule_chain(num: int) -> str:
    """Return a grammar in Lark's syntax of `num` rules, each of which refers to the next."""
    rules = "\n".join(f'r{number}: "a" r{number + 1}' for number in range(num))
    return f'start: r0\n{rules}\nr{num}: "b"\n'


def ebnf_chain(num: int) -> str:
    """Return a grammar in EBNF of `num` rules, each of which refers to the next."""
    rules = "\n".join(f'r{number} ::= "a" r{number + 1}' for number in range(num))
    return f'root ::= r0\n{rules}\nr{num} ::= "b"\n'


def reference_chain(num: int) -> dict[str, Any]:
    """Return a JSON schema of `num` definitions, each of which refers to the next."""
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
    """Return a JSON schema with `num` entries of allOf."""
    return {
        "allOf": [
            {"type": "object", "properties": {f"p{number}": {"type": "string"}}} for number in range(num)
        ]
    }


def nested(num: int) -> dict[str, Any]:
    """Return a JSON schema of arrays nested `num` deep."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num):
        schema = {"type": "array", "items": schema}
    return schema


def by_schema(schema: Any) -> dict[str, Any]:
    """Return the fields of a chat body that ask for an answer by this schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def structured(**parameters: Any) -> dict[str, Any]:
    """Return the fields of a chat body that ask for an answer by these structured-output parameters."""
    return {"structured_outputs": parameters}


for num in (1500, 5000, 10_000, 20_000, 50_000):
    chats(f"grammar of {num:,} chained rules", lambda num=num: structured(grammar=rule_chain(num)))
chats("EBNF of 50,000 chained rules", lambda: structured(grammar=ebnf_chain(50_000)))
for num in (300, 700, 1000, 3000):
    chats(f"schema of {num:,} chained references", lambda num=num: by_schema(reference_chain(num)))
chats("schema with 2,000 allOf", lambda: by_schema(all_of(2000)))
chats("schema nested 400 deep", lambda: by_schema(nested(400)))
chats("schema that refers to itself", lambda: by_schema({"$ref": "#"}))
for num in (10_000, 200_000):
    chats(
        f"choice of {num:,}",
        lambda num=num: structured(choice=[f"choice {number}" for number in range(num)]),
    )
chats(
    "grammar of 20,000 alternatives",
    lambda: structured(grammar="start: " + " | ".join(f'"w{number}"' for number in range(20_000))),
)
chats("regex with large bounds", lambda: structured(regex="(a+)+{1,100000}b"))
chats("regex with nested bounds", lambda: structured(regex="((a{1,900}){1,900}){1,900}"))
chats("regex of a megabyte", lambda: structured(regex="(a|b)" * 200_000))
chats(
    "pattern with nested bounds in a schema",
    lambda: by_schema({"type": "string", "pattern": "((a{1,900}){1,900}){1,900}"}),
)
for name, num in (("schema of half a megabyte", 30_000), ("enum of 5 MB", 300_000)):
    chats(name, lambda num=num: by_schema({"enum": [f"value {number}" for number in range(num)]}))
chats("a grammar of 200,000 line ends", lambda: structured(grammar="\n" * 200_000))
AMBIGUOUS = 'start: a\na: a a | a a a | "x"'
MORE_AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "" | "x" | "y"'
chats("ambiguous grammar", lambda: structured(grammar=AMBIGUOUS) | {"max_tokens": 400})
chats("more ambiguous grammar", lambda: structured(grammar=MORE_AMBIGUOUS) | {"max_tokens": 400})
chats(
    "ambiguous grammar, 16 answers",
    lambda: structured(grammar=MORE_AMBIGUOUS) | {"max_tokens": 400, "n": 16},
)


def _answer_in_responses(schema: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    return "/v1/responses", {"model": MODEL, "input": "Hello!", "text": text} | fields


sends(
    "schema with 10,000 allOf in responses",
    lambda: [
        _answer_in_responses(all_of(10_000), max_output_tokens=16, store=False, stream=is_stream)
        for is_stream in (False, True)
    ],
)
# Stored or not, as vLLM's two checks of it read the word.
sends(
    "responses in the background",
    lambda: [
        _answer_in_responses(reference_chain(300), background=True, store=store)
        for store in (True, False, "false")
    ],
)
sends(
    "schema with 10,000 allOf in messages",
    lambda: [
        (
            "/v1/messages",
            {"model": MODEL, "messages": HELLO, "max_tokens": 16}
            | {"output_config": {"format": {"type": "json_schema", "schema": all_of(10_000)}}},
        )
    ],
)


@case("eight streams with a fatal grammar")
async def chain_in_streams(attacker: Attacker) -> Outcome:
    """Ask for eight streams at once with a grammar that can end its compiler."""
    fields = structured(grammar=rule_chain(1500)) | {"stream": True}
    return list(await asyncio.gather(*(attacker.chat(**fields) for _ in range(8))))


@case("slow grammars, then a harmless one")
async def many_slow_grammars(attacker: Attacker) -> Outcome:
    """Ask for several at once; the harmless one must still be answered."""
    slow = [{"enum": [f"{number}-{value}" for value in range(9000)]} for number in range(6)]
    calls = [attacker.chat(**by_schema(each)) for each in slow]
    return [*await asyncio.gather(*calls), await attacker.chat(response_format={"type": "json_object"})]


def _calls_of_an_evil_tool() -> list[dict[str, Any]]:
    """Return the fields that demand a tool call whose parameters are a chain of references."""
    tool = {"type": "function", "function": {"name": "f", "parameters": reference_chain(1000)}}
    choices = ("required", {"type": "function", "function": {"name": "f"}})
    return [{"tools": [tool], "tool_choice": choice} for choice in choices]


chats("tools with 1,000 chained references", _calls_of_an_evil_tool)


def _many_triggers() -> str:
    """Return a structural tag whose triggers are each compared with each structure."""
    structures = [{"begin": f"<{4999 - number}>", "schema": {}, "end": "</>"} for number in range(1000)]
    return json.dumps({"triggers": [f"<{number}" for number in range(5000)], "structures": structures})


chats("5,000 triggers of a structural tag", lambda: structured(structural_tag=_many_triggers()))


def _growing(number: int) -> dict[str, Any]:
    """Return the fields of a question by a regex that answers read everywhere."""
    regex = r"(\p{L}{1,NUM}\p{N}{1,1000}){1,1000}".replace("NUM", str(990 - number))
    more = {"n": 4, "max_tokens": 100, "temperature": 2.0, "seed": number, "ignore_eos": True}
    return structured(regex=regex) | more


chats("eight regexes that grow", lambda: [_growing(number) for number in range(8)])
