"""Bodies that are large, malformed, or ask for much."""

from __future__ import annotations

import asyncio
import zlib

from bench.live.robustness.attacks.attacker import (
    CHAT,
    HELLO,
    MIB,
    MODEL,
    Attacker,
    Outcome,
    case,
    chats,
    completion,
    sends,
)

# -- large, or asking for much -----------------------------------------------------------------------------------------

sends("1,024 prompts × 64", lambda: [completion(prompt=["a"] * 1024, n=64)])
sends("64 prompts × 4", lambda: [completion(prompt=["a"] * 64, n=4)])
chats("a bad word of 5 MB", lambda: {"bad_words": ["x" * 5 * MIB]})
chats(
    "256 bad words of 1,000 characters",
    lambda: {"bad_words": [f"{number} " + "né " * 330 for number in range(256)]},
)
chats(
    "128 bad words of 64 answers",
    lambda: {"bad_words": [chr(65 + number) for number in range(128)], "n": 64, "max_tokens": 40},
)
chats("a million bad words", lambda: {"bad_words": ["x"] * 1_000_000})
for num in (500_000, 40_000):
    chats(
        f"{num:,} entries of logit_bias",
        lambda num=num: {"logit_bias": {str(number): 1 for number in range(num)}},
    )
chats("40,000 stop strings", lambda: {"stop": [f"stop {number}" for number in range(40_000)]})
chats("a stop string of 5 MB", lambda: {"stop": "x" * 5 * MIB})
chats(
    "20 log probabilities of 32 answers",
    lambda: {"logprobs": True, "top_logprobs": 20, "n": 32, "max_tokens": 200, "ignore_eos": True},
)
sends(
    "15 MB prompt, truncated",
    lambda: [completion(prompt="x " * (15 << 19), truncate_prompt_tokens=100)],
)
sends("15 MB prompt", lambda: [completion(prompt="x " * (15 << 19))])
sends("15 MB of white space", lambda: [completion(prompt=" " * (15 << 20))])
sends("60,000 characters of one word", lambda: [completion(prompt="é" * 30_000)])
for num in (100_000, 10_000):
    sends(f"{num:,} messages", lambda num=num: [(CHAT, {"model": MODEL, "messages": HELLO * num})])
chats("2,000 messages", lambda: {"messages": HELLO * 2000, "max_tokens": 2})
sends("800,000 unknown fields", lambda: [(CHAT, {f"f{number}": 1 for number in range(800_000)})])
chats("40,000 unknown fields", lambda: {f"f{number}": 1 for number in range(40_000)})
sends("5 million token ids", lambda: [("/v1/completions", b'{"prompt":[' + b"1," * 5_000_000 + b"1]}")])
sends("49,000 token ids", lambda: [completion(prompt=[1] * 49_000)])
chats(
    "10,000 tools",
    lambda: {"tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(10_000)]},
)
chats(
    "a template of the client's own",
    lambda: {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
)
chats("answers by the thousand, as a text", lambda: {"n": "16384"})
chats(
    "repetitions of any size",
    lambda: {"repetition_detection": {"min_pattern_size": 1, "max_pattern_size": 10**6, "min_count": 2}},
)


@case("a compressed bomb")
async def compressed_bomb(attacker: Attacker) -> Outcome:
    """Send a small compressed body that would be huge when unpacked."""
    packed = zlib.compress(b'{"a":"' + b"x" * (256 * MIB) + b'"}')
    return [await attacker.post(CHAT, packed, **{"Content-Encoding": "deflate"})]


@case("400 calls at once")
async def a_flood_of_calls(attacker: Attacker) -> Outcome:
    """Send hundreds of calls at once."""
    return list(await asyncio.gather(*(attacker.chat(max_tokens=2) for _ in range(400))))


@case("searches")
async def searches(attacker: Attacker) -> Outcome:
    """Search sessions for long, broken and odd queries."""
    queries = ("x" * MIB, '" OR 1=1 --', "%" * 5000, "\x00", "a b c * NEAR( ", "ab")
    return [await attacker.get("/api/sessions", params={"q": query, "limit": "-1"}) for query in queries]
