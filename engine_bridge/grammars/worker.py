"""The helper process: compiles one grammar after the other and returns a verdict on each. Holds a tokenizer and nothing else.

Its stdin is one end of a `multiprocessing.Pipe`. The first message in is a `Setup` as JSON, answered by an empty one; each further one is a
grammar in llguidance's own form, answered by its fault, empty for none. It ends when the pipe does, and may end at any time.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
from llguidance import LLMatcher, LLTokenizer

from engine_bridge.grammars.messages import readable

# A quarter of the smallest stack on which the engine's threads run (2 MiB where the system sets no limit, else mostly 8): what fits in here
# cannot overflow there. Measured: a level of a chain of rules takes 8 to 11 KiB, so some hundred levels fit.
STACK_BYTES = 1 << 20
# Tokens that a grammar is tried with. Chosen: what explodes at once shows in the first few; what grows slowly is bounded while it runs.
TRIAL_TOKENS = 16


class GrammarTokenizer(msgspec.Struct, frozen=True):
    """The facts of the model's tokenizer for helper processes.

    Attributes:
        definition: a Hugging Face tokenizer's JSON, or "byte" for a tokenizer of bytes.
        num_tokens, eos_token_id: None: as the tokenizer says.
    """

    definition: str
    num_tokens: int | None = None
    eos_token_id: int | None = None


class Setup(msgspec.Struct, frozen=True):
    """The first message to a helper.

    Attributes:
        memory_bytes: memory that compiling may add to the process.
        cpu_s: time of a core that one grammar may take before the system ends the process.
    """

    tokenizer: GrammarTokenizer
    memory_bytes: int
    cpu_s: float


def judge(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compile a grammar, and walk it for a few tokens as an answer would. Returns its fault, "" for none."""
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
    """Choose a token of the mask, but no end of the answer, which would show nothing."""
    ends, num_tokens = set(tokenizer.eos_tokens), int(tokenizer.vocab_size)
    start = choice.randrange(max(len(mask), 1))
    for at in (*range(start, len(mask)), *range(start)):
        for bit in range(8) if mask[at] else ():
            token: int = at * 8 + bit
            if mask[at] >> bit & 1 and token not in ends and token < num_tokens:
                return token
    return None


def serve(server: Connection) -> None:
    """Judge grammars until the connection ends."""
    with suppress(EOFError):
        setup = msgspec.json.decode(server.recv_bytes(), type=Setup)
        facts = setup.tokenizer
        tokenizer = LLTokenizer(facts.definition, n_vocab=facts.num_tokens, eos_token=facts.eos_token_id)
        _bound_memory(setup.memory_bytes)
        server.send_bytes(b"")
        while True:
            grammar = server.recv_bytes()
            _bound_cpu(setup.cpu_s)
            server.send_bytes(judge(tokenizer, grammar.decode()).encode())


def _bound_memory(more_bytes: int) -> None:
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - one line of the kernel's
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _bound_cpu(cpu_s: float) -> None:
    """Bound the time of a core from now on, so that an endless grammar ends this process even without its parent."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + cpu_s), hard))


def _keep_silent() -> None:
    """Silence the compiler, which prints clients' grammars into the server's log."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def main() -> None:
    """Run the helper: no core dumps, low priority, a small stack."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)  # answers go before checks
    threading.stack_size(STACK_BYTES)
    _keep_silent()
    thread = threading.Thread(target=serve, args=(Connection(os.dup(sys.stdin.fileno())),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
