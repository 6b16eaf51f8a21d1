"""What the agents of the bench do: programs of several turns with tools between them, the same to every arm, in words of their own round. Pure."""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct

Api = Literal["chat", "responses", "messages", "framework"]
# What happens in the middle of a program: two branches go on from there side by side, a helper under the same system prompt works while its
# caller waits, the client replaces the history by a summary, or nothing.
Event = Literal["", "branches", "helper", "compacts"]

WORDS = "river stone walk quiet seven bright morning letter winter garden sailor window paper island music".split()
# Chosen: an agent's first prompt is long, what its tools bring is shorter; together they stay within the demo model's 4,096 tokens.
FIRST_WORDS, RESULT_WORDS, SUMMARY_WORDS = 420, 130, 200
NUM_TURNS = 5
# Pauses of tools, lognormal, in seconds. Chosen: most of the published ones end within a second (`gateway.recognition.tool_pauses`).
PAUSE_MEDIAN_S, PAUSE_SIGMA, MAX_PAUSE_S = 0.6, 0.8, 3.0
START_WITHIN_S = 3.0
SYSTEM = "You are an agent that mends programs. Read the files that you need, one at a time, and say what to change."


class ToolStep(Struct, frozen=True):
    """The result of one answer's tools, and the time that they take."""

    result: str
    pause_s: float


class LiveProgram(Struct, frozen=True, kw_only=True):
    """One program: a first message, and a step for each of its answers but the last. at_s: when it begins."""

    name: str
    api: Api
    first: str
    steps: tuple[ToolStep, ...]
    at_s: float = 0.0
    event: Event = ""
    aside: tuple[str, ...] = ()
    """Texts of the event: what each branch or the helper is told, or the summary."""
    system: str = SYSTEM

    @property
    def middle(self) -> int:
        """The number of the step after which the event happens."""
        return len(self.steps) // 2


def words(rng: random.Random, num: int) -> str:
    """Return `num` random words."""
    return " ".join(rng.choices(WORDS, k=num))


def programs(number: int, *, has_framework: bool) -> list[LiveProgram]:
    """Return the programs of a round: each API with each event, a program that asks as another one does, and two of a framework's.

    Two programs (`chat`, `twin`) have equal first messages and begin together: only their answers tell them apart.
    """
    rng = random.Random(f"round {number}")
    plans: list[tuple[str, Api, Event]] = [("chat", "chat", ""), ("twin", "chat", "")]
    events: tuple[Event, ...] = ("branches", "helper", "compacts")
    for api, event in zip(("chat", "responses", "messages"), events, strict=True):
        plans.append((f"{api}-{event}", api, event))
    plans += [("responses", "responses", ""), ("messages", "messages", "")]
    plans += [(f"framework-{each}", "framework", "") for each in ("one", "two") if has_framework]
    made = [_program(rng, f"{number}-{name}", api, event) for name, api, event in plans]
    twin = LiveProgram(
        name=made[1].name, api="chat", first=made[0].first, steps=made[1].steps, at_s=made[0].at_s
    )
    return [made[0], twin, *made[2:]]


def _program(rng: random.Random, name: str, api: Api, event: Event) -> LiveProgram:
    num_asides = {"branches": 2, "helper": 1, "compacts": 1}.get(event, 0)
    steps = tuple(
        ToolStep(
            words(rng, RESULT_WORDS),
            min(PAUSE_MEDIAN_S * rng.lognormvariate(0, PAUSE_SIGMA), MAX_PAUSE_S),
        )
        for _ in range(NUM_TURNS)
    )
    return LiveProgram(
        name=name,
        api=api,
        first=f"Mend {words(rng, FIRST_WORDS)}",
        steps=steps,
        at_s=rng.uniform(0, START_WITHIN_S),
        event=event,
        aside=tuple(words(rng, SUMMARY_WORDS) for _ in range(num_asides)),
    )
