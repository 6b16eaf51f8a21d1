"""People who go on with their sessions on one emulated node: they read, type, which may be announced, and send.

Chats. ShareGPT is not beside the project, so sessions are drawn to what is published of it: 73.4% of conversations have several turns and a mean
session has 2.2K tokens (SYMPHONY §2.3, §2.4), 5.75 turns on average (CachedAttention, Gao et al., ATC 2024), answers of 338 tokens (vLLM, Kwon et
al., SOSP 2023); prompts of 45 tokens are what that leaves. Turns, prompts and answers are log-normal; the spreads of the last two are chosen. A token
is 0.75 words. Reading: 228 words a minute (Trauzettel-Klosinski and Dietz, 2012). Typing: 48 words a minute, and what takes longer than a limit is
pasted, which gives the paper's mean lead of 11.3 s. No public trace has keystroke times: the typing is synthetic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from vllm.v1.core.kv_cache_utils import BlockHash

from bench.emulated.core.arrivals import Arrival
from bench.emulated.core.clock import Clock
from bench.emulated.core.node import EmulatedNode, Job
from bench.emulated.core.steps import BLOCK_TOKENS
from bench.emulated.core.tiers import EmulatedTiers
from engine_bridge.driver.kv.layer_groups import register
from engine_bridge.policy.kv.kv_layout import one_group
from kvtiers.keys import BlockKey

WORDS_PER_TOKEN = 0.75
READ_WORDS_PER_S, TYPE_WORDS_PER_S = 228 / 60, 48 / 60
# Longer texts are pasted. It makes the mean lead the paper's 11.3 s where prompts are those of `Chats`.
LONGEST_TYPING_S = 13.72306662643126


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
    """A log-normal law by its mean. sigma: standard deviation of the logarithm."""

    mean: float
    sigma: float

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.mean) - self.sigma**2 / 2

    def draw(self, rng: random.Random) -> float:
        """Return a random value."""
        return rng.lognormvariate(self.mu, self.sigma)


@dataclass(frozen=True, slots=True)
class Chats:
    """The laws that sessions are drawn from. max_tokens: of a whole session, which ends there."""

    turns: LogNormal = LogNormal(5.25, 1.3)  # rounded up: 73.4% are above 1, and the mean is 5.75
    prompts: LogNormal = LogNormal(45, 1.2)
    answers: LogNormal = LogNormal(338, 0.9)
    max_turns: int = 400
    max_tokens: int = 32_768

    def num_turns(self, rng: random.Random) -> int:
        """Return the number of turns of a session."""
        return min(math.ceil(self.turns.draw(rng)), self.max_turns)

    def exchange(self, rng: random.Random) -> Exchange:
        """Return one turn."""
        prompt = min(max(round(self.prompts.draw(rng)), 1), self.max_tokens // 4)
        answer = min(max(round(self.answers.draw(rng)), 1), self.max_tokens // 4)
        lead_s = min(prompt * WORDS_PER_TOKEN / TYPE_WORDS_PER_S, LONGEST_TYPING_S)
        return Exchange(prompt, answer, lead_s, answer * WORDS_PER_TOKEN / READ_WORDS_PER_S)

    def session(self, rng: random.Random) -> Session:
        """Return a whole session."""
        return self._of(self.num_turns(rng), rng)

    def _of(self, num_turns: int, rng: random.Random) -> Session:
        """Return a session of this number of turns, cut where it has too many tokens."""
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
        """Return sessions as one meets them at any moment, each with the number of turns that are over: long ones are met more often."""
        lengths = [self.num_turns(rng) for _ in range(20 * num)]
        met = [self._of(length, rng) for length in rng.choices(lengths, lengths, k=num)]
        return [(session, rng.randrange(len(session))) for session in met]


@dataclass(slots=True, eq=False)
class _User:
    """A person. place: of the next turn in the session; num_tokens: of the session so far."""

    number: int
    rng: random.Random
    session: Session
    place: int
    session_id: str
    num_sessions: int = 0
    num_tokens: int = 0


class Users:
    """A fixed number of people at any time; a person whose session is over begins another one.

    All that they do follows from the seed, but for the times when answers come.

    Args:
        missing: share of turns without an advisory.
        lead_share: times the leads of advisories, which come later than typing begins if it is below 1.
    """

    def __init__(
        self,
        clock: Clock,
        node: EmulatedNode,
        chats: Chats,
        num_users: int,
        seed: int,
        missing: float,
        lead_share: float,
    ) -> None:
        self._clock, self._node, self._chats = clock, node, chats
        self._missing, self._lead_share = missing, lead_share
        self._by_request: dict[str, _User] = {}
        met = chats.under_way(random.Random(f"users {seed}"), num_users)
        self._users = [
            _User(number, random.Random(f"user {seed} {number}"), session, place, f"{number}.0")
            for number, (session, place) in enumerate(met)
        ]

    def start(self) -> None:
        """Begin each session at some moment of reading and typing, with the KV of earlier turns where the node would keep it."""
        for user in self._users:
            for exchange in user.session[: user.place]:
                user.num_tokens += exchange.num_prompt_tokens + exchange.num_answer_tokens
            if user.num_tokens:
                place_kv(self._node, user.session_id, (user.num_tokens - 1) // BLOCK_TOKENS)
            exchange = user.session[user.place]
            think_s = exchange.lead_s + exchange.read_s
            self._clock.at(user.rng.uniform(0, think_s), lambda now, user=user: self._type(user, now))  # type: ignore[misc]

    def _type(self, user: _User, now: float) -> None:
        lead_s = user.session[user.place].lead_s
        if user.rng.random() >= self._missing:
            late_s = lead_s * (1 - self._lead_share)
            self._clock.at(now + late_s, lambda now: self._node.advise(user.session_id))
        self._clock.at(now + lead_s, lambda now: self._send(user, now))

    def _send(self, user: _User, now: float) -> None:
        exchange = user.session[user.place]
        turn = Arrival(
            f"{user.session_id}.{user.place:04d}",
            now,
            user.num_tokens + exchange.num_prompt_tokens,
            exchange.num_answer_tokens,
            session=user.session_id,
        )
        self._by_request[turn.request_id] = user
        self._node.submit(turn)

    def ended(self, job: Job) -> None:
        """Let the answer be read and the next question be typed."""
        user = self._by_request.pop(job.arrival.request_id)
        read_s = user.session[user.place].read_s
        user.num_tokens = job.arrival.num_prompt_tokens + job.arrival.num_answer_tokens
        user.place += 1
        if user.place == len(user.session):
            user.num_sessions += 1
            user.session_id = f"{user.number}.{user.num_sessions}"
            user.session, user.place = self._chats.session(user.rng), 0
            user.num_tokens = 0
        self._clock.at(self._clock.now + read_s, lambda now: self._type(user, now))


def remember(tiers: EmulatedTiers, session_id: str, names: Sequence[BlockHash]) -> None:
    """Have advisories of a session find the blocks with these names."""
    left = SimpleNamespace(session_id=session_id, cache_salt=None, block_hashes=names, sampling_params=None)
    tiers.promoter.remember(left)  # type: ignore[arg-type]  # all that it looks at


def place_kv(node: EmulatedNode, session_id: str, num_blocks: int) -> None:
    """Put the KV of a session that went on before the run began where the node would keep it."""
    names = node.requests.names(session_id, num_blocks)
    tiers, pool = node.tiers, node.scheduler.kv_cache_manager.block_pool
    if tiers is not None:
        tiers.hollow.place(session_id, [BlockKey(bytes(name)) for name in names])
        remember(tiers, session_id, names)
    elif node.engine.has_prefix_cache and 0 < num_blocks <= pool.get_num_free_blocks():
        blocks = pool.get_new_blocks(num_blocks)
        register(pool, one_group(node.engine.block_tokens).leading_entries(names), blocks)
        pool.free_blocks(reversed(blocks))
