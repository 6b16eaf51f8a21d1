"""State machines of which each step may be any action.

Hypothesis leaves out most of the rules of a machine in each example, so that long chains of different steps are rare: what a store or a turn
does wrong takes such chains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule


def action(when: Callable[[Any], Any] = lambda machine: True, often: int = 1, **drawn: Any) -> Any:
    """Make a method of a machine an action. when: whether it may be taken. often: its weight among all. drawn: strategies for its arguments."""

    def mark(method: Any) -> Any:
        method.when, method.often, method.drawn = when, often, drawn
        return method

    return mark


class Machine(RuleBasedStateMachine):
    """Takes actions; those that are coroutines run on its loop."""

    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    actions: dict[str, Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        found = {name: each for name, each in vars(cls).items() if hasattr(each, "drawn")}
        # What is first is drawn most often.
        cls.actions = dict(sorted(found.items(), key=lambda item: -item[1].often))

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)

    @rule(data=st.data())
    def step(self, data: Any) -> None:
        actions = self.actions
        names = [name for name, each in actions.items() if each.when(self) for _ in range(each.often)]
        name = data.draw(st.sampled_from(names), "action")
        given = {field: data.draw(drawn, field) for field, drawn in actions[name].drawn.items()}
        done = actions[name](self, **given)
        if done is not None:
            self.runner.run(done)
