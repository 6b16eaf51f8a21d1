"""The attacks by name, and what may come of each."""

from __future__ import annotations

from dataclasses import dataclass

from bench.live.attacks.attacker import HELLO, MIB, MODEL, Attack, ws_frame
from bench.live.attacks.bodies import (
    a_flood_of_calls,
    all_logprobs,
    body,
    completion,
    compressed_bomb,
    fields,
    malformed,
    many_answers,
    odd_numbers,
    odd_paths,
    other_doors_malformed,
    searches,
)
from bench.live.attacks.connections import (
    connects_and_leaves,
    frames_before_hello,
    half_heads,
    lying_length,
    pipelined,
    slow_body,
    unread_stream,
    wrong_keys,
)
from bench.live.attacks.grammars import (
    AMBIGUOUS,
    MORE_AMBIGUOUS,
    all_of,
    ambiguous_often,
    chain_in_streams,
    ebnf_chain,
    evil_tools,
    grammar,
    in_the_background,
    many_slow_grammars,
    many_triggers,
    nested,
    reference_chain,
    rule_chain,
    schema,
    schema_in_messages,
    schema_in_responses,
    structured,
)
from bench.live.attacks.neighbours import (
    CHANGED,
    INSIDES,
    WORDS,
    a_pattern_in_many_answers,
    adapters_that_come_and_go,
    as_schema,
    bodies_that_break_rendering,
    calls_among_many_keys,
    long_drafts,
    many_files_and_lists,
    names_for_the_log,
    odd_adapters,
    odd_heads_and_names,
    regexes_that_grow,
    special_tokens,
    unseen,
)
from bench.live.attacks.sockets import (
    fragments,
    frames,
    long_messages,
    many_sockets_of_one,
    typing_flood,
    unmasked,
)


@dataclass(frozen=True)
class Case:
    """An attack and what may come of it; `bad`: outcomes that mean harm, beside statuses of 500 and more."""

    name: str
    attack: Attack
    bad: tuple[str, ...] = ("open",)


BETWEEN_KEYS = ("open", CHANGED)
INSIDE = ("open", *(f"tells {word}" for word in INSIDES))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

CASES = (
    *(
        Case(f"grammar of {num:,} chained rules", grammar(rule_chain(num)))
        for num in (1500, 5000, 10_000, 20_000, 50_000)
    ),
    Case("EBNF of 50,000 chained rules", grammar(ebnf_chain(50_000))),
    *(
        Case(f"schema of {num:,} chained references", schema(reference_chain(num)))
        for num in (300, 700, 1000, 3000)
    ),
    Case("schema with 2,000 allOf", schema(all_of(2000))),
    Case("schema with 10,000 allOf in responses", schema_in_responses),
    Case("schema with 10,000 allOf in messages", schema_in_messages),
    Case("schema nested 400 deep", schema(nested(400))),
    Case("schema that refers to itself", schema({"$ref": "#"})),
    Case("choice of 200,000", structured(choice=[f"choice {number}" for number in range(200_000)])),
    Case("choice of 10,000", structured(choice=[f"choice {number}" for number in range(10_000)])),
    Case(
        "grammar of 20,000 alternatives",
        grammar("start: " + " | ".join(f'"w{number}"' for number in range(20_000))),
    ),
    Case("regex with large bounds", structured(regex="(a+)+{1,100000}b")),
    Case("regex with nested bounds", structured(regex="((a{1,900}){1,900}){1,900}")),
    Case("regex of a megabyte", structured(regex="(a|b)" * 200_000)),
    Case(
        "pattern with nested bounds in a schema",
        schema({"type": "string", "pattern": "((a{1,900}){1,900}){1,900}"}),
    ),
    Case("schema of half a megabyte", schema({"enum": [f"value {number}" for number in range(30_000)]})),
    Case("enum of 5 MB", schema({"enum": [f"value {number}" for number in range(300_000)]})),
    Case("ambiguous grammar", grammar(AMBIGUOUS, max_tokens=400)),
    Case("more ambiguous grammar", grammar(MORE_AMBIGUOUS, max_tokens=400)),
    Case("ambiguous grammar, 16 answers", ambiguous_often),
    Case("eight streams with a fatal grammar", chain_in_streams),
    Case("slow grammars, then a harmless one", many_slow_grammars),
    Case("tools with 1,000 chained references", evil_tools),
    Case("1,024 prompts × 64", body(COMPLETIONS, lambda: completion(prompt=["a"] * 1024, n=64))),
    Case("64 prompts × 4", many_answers),
    Case("a bad word of 5 MB", fields(lambda: {"bad_words": ["x" * 5 * MIB]})),
    Case(
        "256 bad words of 1,000 characters",
        fields(lambda: {"bad_words": [f"{number} " + "né " * 330 for number in range(256)]}),
    ),
    Case(
        "128 bad words of 64 answers",
        fields(lambda: {"bad_words": [chr(65 + number) for number in range(128)], "n": 64, "max_tokens": 40}),
    ),
    Case("a million bad words", fields(lambda: {"bad_words": ["x"] * 1_000_000})),
    Case(
        "500,000 entries of logit_bias",
        fields(lambda: {"logit_bias": {str(number): 1 for number in range(500_000)}}),
    ),
    Case(
        "40,000 entries of logit_bias",
        fields(lambda: {"logit_bias": {str(number): 1 for number in range(40_000)}}),
    ),
    Case("40,000 stop strings", fields(lambda: {"stop": [f"stop {number}" for number in range(40_000)]})),
    Case("a stop string of 5 MB", fields(lambda: {"stop": "x" * 5 * MIB})),
    Case("odd numbers", odd_numbers),
    Case("20 log probabilities of 32 answers", all_logprobs),
    Case(
        "15 MB prompt, truncated",
        body(COMPLETIONS, lambda: completion(prompt="x " * (15 << 19), truncate_prompt_tokens=100)),
    ),
    Case("15 MB prompt", body(COMPLETIONS, lambda: completion(prompt="x " * (15 << 19)))),
    Case("15 MB of white space", body(COMPLETIONS, lambda: completion(prompt=" " * (15 << 20)))),
    Case("60,000 characters of one word", body(COMPLETIONS, lambda: completion(prompt="é" * 30_000))),
    Case("100,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 100_000})),
    Case("10,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 10_000})),
    Case("2,000 messages", body(CHAT, lambda: {"model": MODEL, "messages": HELLO * 2000, "max_tokens": 2})),
    Case("800,000 unknown fields", body(CHAT, lambda: {f"f{number}": 1 for number in range(800_000)})),
    Case("40,000 unknown fields", fields(lambda: {f"f{number}": 1 for number in range(40_000)})),
    Case("5 million token ids", body(COMPLETIONS, lambda: b'{"prompt":[' + b"1," * 5_000_000 + b"1]}")),
    Case("49,000 token ids", body(COMPLETIONS, lambda: completion(prompt=[1] * 49_000))),
    Case(
        "10,000 tools",
        fields(
            lambda: {
                "tools": [
                    {"type": "function", "function": {"name": f"f{number}"}} for number in range(10_000)
                ]
            }
        ),
    ),
    Case(
        "a template of the client's own",
        fields(lambda: {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    ),
    Case("a grammar of 200,000 line ends", grammar("\n" * 200_000)),
    Case("5,000 triggers of a structural tag", many_triggers),
    Case("answers by the thousand, as a text", fields(lambda: {"n": "16384"})),
    Case(
        "repetitions of any size",
        fields(
            lambda: {
                "repetition_detection": {"min_pattern_size": 1, "max_pattern_size": 10**6, "min_count": 2}
            }
        ),
    ),
    Case("responses in the background", in_the_background),
    Case("malformed chat calls", malformed),
    Case("malformed calls at other doors", other_doors_malformed),
    Case("a compressed bomb", compressed_bomb),
    Case("400 calls at once", a_flood_of_calls),
    Case("searches", searches),
    Case("odd paths and heads", odd_paths),
    Case("3,000 halves of a head", half_heads),
    Case("40 halves of a frame before hello", frames_before_hello(40, 12 * MIB)),
    Case("200 halves of a frame before hello", frames_before_hello(200, 4 * MIB)),
    Case("a body that stops", slow_body),
    Case("lengths that lie", lying_length),
    Case("2,000 requests in a row, unread", pipelined),
    Case("a stream that nobody reads", unread_stream),
    Case("2,000 connections that leave at once", connects_and_leaves),
    Case("500 wrong keys", wrong_keys),
    Case("a frame without a mask", unmasked, bad=("open", "answered", "error")),
    Case("a frame of 16 MB", frames(ws_frame(b"x" * (16 * MIB - 14)))),
    Case("a frame that says it has 2^62 bytes", frames(ws_frame(b"x", size=1 << 62))),
    Case("200,000 fragments", fragments, bad=()),
    Case("10,000 pings", frames(ws_frame(b"x" * 100, opcode=9) * 10_000)),
    Case("a reserved opcode", frames(ws_frame(b"x", opcode=5)), bad=("open", "answered")),
    Case("binary that is no text", frames(ws_frame(b"\xff\xfe", opcode=1)), bad=("open", "answered")),
    Case(
        "a megabyte of nested arrays in a ping",
        frames(ws_frame(b'{"type":"ping","t":' + b"[" * 500_000 + b"]" * 500_000 + b"}")),
    ),
    Case("3,000 frames of typing", typing_flood, bad=()),
    Case("messages of a megabyte", long_messages, bad=("open", "stored")),
    Case("300 sockets of one key", many_sockets_of_one),
    Case("long drafts without a blank", long_drafts),
    Case("many small files, and lists in frames", many_files_and_lists),
    Case("calls among 5,000 keys", calls_among_many_keys),
    Case(
        "a pattern worn out by 1,536 answers",
        unseen(a_pattern_in_many_answers, as_schema(WORDS), as_schema({"type": "integer"})),
        bad=BETWEEN_KEYS,
    ),
    Case("eight regexes that grow", unseen(regexes_that_grow, as_schema(WORDS)), bad=BETWEEN_KEYS),
    Case("adapters that do not fit", unseen(odd_adapters, {}, {"model": "shout"}), bad=BETWEEN_KEYS),
    Case(
        "adapters that come and go",
        unseen(adapters_that_come_and_go, {}, {"model": "shout"}, {"model": "pirate"}),
        bad=BETWEEN_KEYS,
    ),
    Case("names for the log", unseen(names_for_the_log, {}), bad=BETWEEN_KEYS),
    Case("bodies that break rendering", bodies_that_break_rendering, bad=INSIDE),
    Case("heads and names", odd_heads_and_names, bad=("open", "tells versions")),
    Case("special tokens in contents", unseen(special_tokens, {}), bad=BETWEEN_KEYS),
)
assert len({case.name for case in CASES}) == len(CASES)
