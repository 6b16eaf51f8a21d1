"""The helper process: compiles one grammar after the other and says what is wrong with each. Holds a tokenizer and nothing else.

Frames on stdin and stdout, which are a socket, are a length of four bytes (big-endian) and so many bytes. The first one in is a `Setup` as JSON,
answered by "{}"; each further one is a grammar in llguidance's own form, answered by a `Verdict` as JSON. It ends when stdin does, and may end at
any time.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import threading
from typing import IO

import msgspec
from llguidance import LLMatcher, LLTokenizer

from engine_bridge.grammars.messages import readable

# A quarter of the smallest stack on which the engine's threads run (2 MiB where the system sets no limit, else mostly 8): what fits in here
# cannot overflow there. Measured: a level of a chain of rules takes 8 to 11 KiB, so some hundred levels fit.
STACK_BYTES = 1 << 20
# Tokens that a grammar is tried with. Chosen: what explodes at once shows in the first few; what grows slowly is bounded while it runs.
TRIAL_TOKENS = 16
HEAD_BYTES = 4  # of a frame: the length of its body


class Setup(msgspec.Struct):
    """tokenizer: a Hugging Face tokenizer's JSON, or "byte" for one that knows bytes only. num_tokens, eos_token_id: None for the tokenizer's own.
    memory_bytes: what compiling may add to the process. cpu_s: what one grammar may take of a core before the system ends the process."""

    tokenizer: str
    num_tokens: int | None
    eos_token_id: int | None
    memory_bytes: int
    cpu_s: float


class Verdict(msgspec.Struct):
    """reason: what is wrong with the grammar, "" if nothing is."""

    reason: str


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream, also in the middle of a frame."""
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    size = int.from_bytes(head, "big")
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Writes a body with its length before it, as four bytes in big-endian order."""
    stream.write(len(body).to_bytes(HEAD_BYTES, "big") + body)
    stream.flush()


def judge(tokenizer: LLTokenizer, grammar: str) -> str:
    """What is wrong with a grammar, "" if nothing is: it is compiled, and walked for a few tokens as an answer would."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    choice = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        token = _any_allowed(matcher.compute_bitmask(), choice, tokenizer)
        if token is None:
            break
        matcher.consume_token(token)
    return readable(matcher.get_error()) if matcher.is_error() else ""


def _any_allowed(mask: bytes, choice: random.Random, tokenizer: LLTokenizer) -> int | None:
    """A token of the mask other than an end of the answer, which would show nothing."""
    ends, num_tokens = set(tokenizer.eos_tokens), int(tokenizer.vocab_size)
    start = choice.randrange(max(len(mask), 1))
    for at in (*range(start, len(mask)), *range(start)):
        for bit in range(8) if mask[at] else ():
            token: int = at * 8 + bit
            if mask[at] >> bit & 1 and token not in ends and token < num_tokens:
                return token
    return None


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Until `requests` ends."""
    first = read_frame(requests)
    if first is None:
        return
    setup = msgspec.json.decode(first, type=Setup)
    tokenizer = LLTokenizer(setup.tokenizer, n_vocab=setup.num_tokens, eos_token=setup.eos_token_id)
    _bound_memory(setup.memory_bytes)
    write_frame(replies, b"{}")
    while (grammar := read_frame(requests)) is not None:
        _bound_cpu(setup.cpu_s)
        reason = judge(tokenizer, grammar.decode())
        write_frame(replies, msgspec.json.encode(Verdict(reason)))


def _bound_memory(more_bytes: int) -> None:
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - one line of the kernel's
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_cpu(cpu_s: float) -> None:
    """From now on. So that a grammar without end also ends when nobody is left to end this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + cpu_s), hard))


def _keep_silent() -> None:
    """The compiler prints of its own accord, and would quote a client's grammar, in the middle of the replies or in the server's log."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.dup2(silence, sys.stderr.fileno())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # answers go before checks
    threading.stack_size(STACK_BYTES)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    _keep_silent()
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, replies))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
