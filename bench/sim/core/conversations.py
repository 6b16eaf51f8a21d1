"""People and agents who ask more than once: how long their texts are, how long they read and type, how often they go on.

Chats. ShareGPT is not beside the project, so sessions are drawn to what is published of it: 73.4% of conversations have several turns and a mean
session has 2.2K tokens (SYMPHONY §2.3, §2.4), 5.75 turns on average (CachedAttention, Gao et al., ATC 2024), answers of 338 tokens (vLLM, Kwon et
al., SOSP 2023); prompts of 45 tokens are what that leaves. Turns, prompts and answers are log-normal; the spreads of the last two are chosen. A token
is 0.75 words. Reading: 228 words a minute (Trauzettel-Klosinski and Dietz, 2012). Typing: 48 words a minute, and what takes longer than a limit is
pasted, which gives the paper's mean lead of 11.3 s. No public trace has keystroke times: the typing is synthetic.

`recorded` reads conversations with their texts instead: MT-Bench-101 (Bai et al., 2024, Apache-2.0), 3 turns on average; there a token is 4
characters.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

from bench.data import MT_BENCH, lines_of

WORDS_PER_TOKEN, CHARACTERS_PER_TOKEN = 0.75, 4
READ_WORDS_PER_S, TYPE_WORDS_PER_S = 228 / 60, 48 / 60
MEAN_LEAD_S = 11.3


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn. lead_s: of typing, before it is sent; read_s: after the answer, before the next is typed."""

    num_prompt_tokens: int
    num_answer_tokens: int
    lead_s: float
    read_s: float


Session = Sequence[Exchange]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """By its mean; sigma: of the logarithm."""

    mean: float
    sigma: float

    @property
    def mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    def draw(self, rng: random.Random) -> float:
        return rng.lognormvariate(self.mu, self.sigma)

    def mean_below(self, limit: float) -> float:
        """The mean of what is drawn, where more than the limit counts as the limit."""
        z = (math.log(limit) - self.mu) / self.sigma
        normal = NormalDist()
        return self.mean * normal.cdf(z - self.sigma) + limit * (1 - normal.cdf(z))


@dataclass(frozen=True, slots=True)
class Chats:
    """What is drawn for a session. max_tokens: of a whole session, which ends there.

    prompt_tokens, answer_tokens: fixed ones, in place of drawn ones.
    """

    turns: LogNormal = LogNormal(5.25, 1.3)  # rounded up: 73.4% are above 1, and the mean is 5.75
    prompts: LogNormal = LogNormal(45, 1.2)
    answers: LogNormal = LogNormal(338, 0.9)
    max_turns: int = 400
    max_tokens: int = 32_768
    prompt_tokens: int = 0
    answer_tokens: int = 0
    name: str = "ShareGPT's published quantiles"

    def num_turns(self, rng: random.Random) -> int:
        return min(math.ceil(self.turns.draw(rng)), self.max_turns)

    def exchange(self, rng: random.Random) -> Exchange:
        """Times go by the drawn lengths, also where fixed ones take their place."""
        prompt = min(max(round(self.prompts.draw(rng)), 1), self.max_tokens // 4)
        answer = min(max(round(self.answers.draw(rng)), 1), self.max_tokens // 4)
        lead_s = min(type_s(prompt), lead_limit_s(self.prompts))
        exchange = Exchange(prompt, answer, lead_s, answer * WORDS_PER_TOKEN / READ_WORDS_PER_S)
        if self.prompt_tokens:
            exchange = replace(exchange, num_prompt_tokens=self.prompt_tokens)
        if self.answer_tokens:
            exchange = replace(exchange, num_answer_tokens=self.answer_tokens)
        return exchange

    def session(self, rng: random.Random) -> Session:
        """A whole one."""
        return self._of(self.num_turns(rng), rng)

    def _of(self, num_turns: int, rng: random.Random) -> Session:
        """Of so many turns, cut where it has too many tokens."""
        found: list[Exchange] = []
        num_tokens = 0
        for _ in range(num_turns):
            exchange = self.exchange(rng)
            num_tokens += exchange.num_prompt_tokens + exchange.num_answer_tokens
            if num_tokens > self.max_tokens:
                break
            found.append(exchange)
        return found

    def under_way(self, rng: random.Random, num: int) -> list[tuple[Session, int]]:
        """Sessions as one meets them at any moment, each with the number of turns that are over: long ones are met more often."""
        lengths = [self.num_turns(rng) for _ in range(20 * num)]
        met = [self._of(length, rng) for length in rng.choices(lengths, lengths, k=num)]
        return [(session, rng.randrange(len(session))) for session in met]


@dataclass(frozen=True, slots=True)
class Recorded(Chats):
    """Sessions of a trace, in random order."""

    sessions: tuple[tuple[Exchange, ...], ...] = ()

    def session(self, rng: random.Random) -> Session:
        return rng.choice(self.sessions)

    def under_way(self, rng: random.Random, num: int) -> list[tuple[Session, int]]:
        met = rng.choices(self.sessions, [len(session) for session in self.sessions], k=num)
        return [(session, rng.randrange(len(session))) for session in met]


def type_s(num_tokens: int) -> float:
    return num_tokens * WORDS_PER_TOKEN / TYPE_WORDS_PER_S


@cache
def lead_limit_s(prompts: LogNormal) -> float:
    """What takes longer to type is pasted: so that the mean lead is the paper's."""
    low, high, per_token_s = 0.1, 10_000.0, type_s(1)
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        mean_s = prompts.mean_below(middle / per_token_s) * per_token_s
        low, high = (middle, high) if mean_s < MEAN_LEAD_S else (low, middle)
    return low


def recorded(path: Path = MT_BENCH) -> Recorded:
    """MT-Bench-101. Raises FileNotFoundError without it."""
    if not path.exists():
        raise FileNotFoundError(path)
    sessions = [tuple(_turns(json.loads(line)["history"])) for line in lines_of(path)]
    return Recorded(name=path.name.removesuffix(".jsonl.zst"), sessions=tuple(filter(None, sessions)))


def _turns(history: Sequence[dict[str, str]]) -> Iterator[Exchange]:
    limit_s = lead_limit_s(Chats().prompts)
    for turn in history:
        prompt = max(len(turn["user"]) // CHARACTERS_PER_TOKEN, 1)
        answer = max(len(turn["bot"]) // CHARACTERS_PER_TOKEN, 1)
        read_s = answer * WORDS_PER_TOKEN / READ_WORDS_PER_S
        yield Exchange(prompt, answer, min(type_s(prompt), limit_s), read_s)
