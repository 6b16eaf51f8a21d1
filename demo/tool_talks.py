"""Training text in which the assistant may call tools, in the form that vLLM's `hermes` parser reads.

The prompt lists what may be called as the call itself is written, with the kind of value in place of each value:
``{"name": "get_price", "arguments": {"item": "text"}} The price of an item.``  So a call is a line copied from the
list with values copied from the question, which a model of this size can learn for tools that it has never seen.
Tool results come back in a user turn between ``<tool_response>`` marks.  The chat template writes the same text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import phrases as P
import text

CALL, CALL_END, RESULT, RESULT_END = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
NO_TOOL = "I have no tool for that."
NUMBER, TEXT = "number", "text"

GETTERS = (
    "get_{}",
    "{}_of",
    "get_{}",
    "find_{}",
    "{}",
    "lookup_{}",
    "fetch_{}",
    "read_{}",
    "show_{}",
    "{}_tool",
    "check_{}",
    "query_{}",
    "{}_info",
)
ATTRIBUTES = (
    "price age status stock population score balance size phone email owner height weight speed rating "
    "address salary level address length number code color year language currency capital"
).split()
HOLDERS = "item city user order account person product place thing key name id word country x".split()
# How people ask for what has a name of its own.
ASK_BY_WORD = {
    "price": ("What does {v} cost?", "How much is {v}?"),
    "age": ("How old is {v}?",),
    "height": ("How tall is {v}?",),
    "weight": ("How heavy is {v}?", "How much does {v} weigh?"),
    "speed": ("How fast is {v}?",),
    "size": ("How big is {v}?",),
    "length": ("How long is {v}?",),
    "owner": ("Who owns {v}?", "Who has {v}?"),
    "address": ("Where does {v} live?",),
    "population": ("How many people live in {v}?",),
    "phone": ("How can I call {v}?",),
}
ASK_ATTRIBUTE = (
    "What is the {a} of {v}?",
    "Tell me the {a} of {v}.",
    "Give me the {a} of {v}.",
    "Please find the {a} of {v}.",
    "Can you tell me the {a} of {v}?",
    "I need the {a} of {v}.",
    "Do you know the {a} of {v}?",
    "Look up the {a} of {v}.",
    "What {a} has {v}?",
    "Which {a} does {v} have?",
    "What is the {a} for {v}?",
    "What is {v}'s {a}?",
    "How is the {a} of {v}?",
    "{v}: what is the {a}?",
    "Show me the {a} in {v}.",
    "What is the {a} in {v}?",
    "Get the {a} of {v}.",
    "Get the {a} about {v}.",
    "Check the {a} for {v}.",
    "Find the {a} at {v}.",
    "Find a {a} in {v}.",
    "Get me a {a} by {v}.",
    "Search the {a} for {v}.",
    "Read the {a} from {v}.",
    "When is the {a} to {v}?",
    "Who is the {a} of {v}?",
    "Where is the {a} of {v}?",
    "What is the {a} of the {h} {v}?",
    "Show the {a} of {h} {v}.",
)
ABOUT_ATTRIBUTE = (
    "The {a} of a {h}.",
    "Returns the {a} of a {h}.",
    "Get the {a} of a {h}.",
    "{a} by {h}",
    "",
)
ASK_WEATHER = (
    "What is the weather in {v}?",
    "What is the weather like in {v}?",
    "How is the weather in {v}?",
    "Tell me the weather in {v}.",
    "What's the weather in {v} today?",
    "What is the weather like in {v} today?",
    "Weather in {v}?",
    "Please check the weather in {v}.",
)
ABOUT_WEATHER = (
    "Today's weather in a city.",
    "The weather of a city.",
    "Get the current weather for a location.",
    "Returns the weather.",
    "Weather in a place",
)
SKIES = "sunny cloudy rainy windy foggy clear stormy snowy warm cold dry".split()
ASK_TIME = ("What time is it in {v}?", "Tell me the time in {v}.", "What is the time in {v}?", "Time in {v}?")
ASK_NOW = ("What time is it?", "Tell me the time.", "What is the time now?", "Please check the clock.")
ABOUT_TIME = ("The time in a city.", "Get the current time.", "Tells the time.", "Current time")
# Each: names, what it says of itself, questions.
SUMS = (
    (
        "add sum plus add_numbers get_sum",
        "Adds two numbers.",
        ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b}?", "What is {a} + {b}?"),
    ),
    (
        "multiply times product multiply_numbers",
        "Multiplies two numbers.",
        ("What is {a} times {b}?", "Multiply {a} and {b}.", "What is {a} * {b}?"),
    ),
    ("subtract minus difference", "Subtracts two numbers.", ("What is {a} minus {b}?", "What is {a} - {b}?")),
)
ASK_UNKNOWN_SUM = (
    "{D} {a} and {b}.",
    "{D} {a} by {b}.",
    "What is {a} {d} {b}?",
    "What is {a} {d} by {b}?",
    "{D} {a} to {b}.",
    "What is the {d} of {a} and {b}?",
    "What is {a} to the {d} of {b}?",
    "{D} {a} to the {d} of {b}.",
    "Give me a {d} between {a} and {b}.",
    "Calculate the {d} of {a} with {b}.",
    "Calculate the {d} for {a} at {b}.",
    "I need the {d} from {a} to {b}.",
)
NUMBER_NAMES = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n"))
ACTIONS = (
    ("play", "song"), ("open", "file"), ("save", "note"), ("delete", "file"), ("send", "message"), ("buy", "item"),
    ("start", "job"), ("stop", "job"), ("book", "hotel"), ("call", "person"), ("print", "page"), ("search", "query"),
)  # fmt: skip
ASK_ACTION = (
    "{D} a {h} to {v}.",
    "{D} a {h} in {v}.",
    "{D} the {h} of {v}.",
    "{D} {h} by {v}.",
    "{D} the {h} in the {v}.",
    "{D} my {h} {v}.",
    "{D} {v}.",
    "{D} {v}.",
    "Please {d} {v}.",
    "Can you {d} {v}?",
    "{D} {v} now.",
    "{D} the {h} {v}.",
    "{D} the {h} {v}.",
)
BEFORE, AFTER = (
    ("Please ", "Now ", "Hey, ", "Then ", "Quick: "),
    (" please", " for me", " now", " again", " today"),
)
ASK_RECORD = (
    "What is the {a} of {h} {n}?",
    "What is the {a} of the {h} {n}?",
    "What is the {a} of {n}?",
    "Who is the {h} {n}?",
    "Show {h} {n}.",
    "Get the {a} of {h} number {n}.",
    "Is {n} a {a} {h}?",
    "Which {a} has {h} {n}?",
)
# Tools that take one number, or two texts. {d} is a verb, {t} and {u} are things, {n}, {v} and {w} values.
ASK_NUMBER = (
    "{D} {n} {t}.",
    "Please {d} {n} {t}.",
    "{D} the {t} to {n}.",
    "{D} {t} {n}.",
    "{D} a {u} of {n} {t}.",
    "How many {u} are {n} {t}?",
    "How much {u} is {n} {t}?",
    "{D} {n} {t} into {u}.",
    "I need a {u} for {n} {t}.",
    "Can you {d} the {u} for {n} {t}?",
    "{D} it in {n} {t}.",
)
THINGS = "meters hours dollars euros pounds days grams degrees steps pages points seats inches feet volume limit rate".split()
VERBS = "convert set change make order count reserve give take wait schedule".split()
ENDS = (
    ("from", "to"),
    ("start", "end"),
    ("source", "target"),
    ("a", "b"),
    ("first", "second"),
    ("left", "right"),
)
ASK_PAIR = (
    "What is the {a} from {v} to {w}?",
    "What is the {a} between {v} and {w}?",
    "Tell me the {a} of {v} and {w}.",
    "{D} {v} and {w}.",
    "{D} {v} with {w}.",
    "{D} {v} to {w}.",
    "Please {d} {v} and {w}.",
    "How {a} is {v} from {w}?",
    "Is {v} {a} than {w}?",
    "{D} a {h} from {v} to {w}.",
    "{D} from {v} to {w}.",
    "Which {a} do {v} and {w} give?",
)
DONE = ("ok", "done", "ready", "saved", "success", "true")


@dataclass
class Use:
    """One tool with a question for it: the call that is right, what it returns and the answer made of that.

    says: the parts of the result that a right answer repeats. topic: what the tool is about, to tell tools apart.
    """

    name: str
    about: str
    arguments: dict
    question: str
    result: str
    answer: str
    says: tuple[str, ...] = ()
    topic: str = ""

    @property
    def shown(self) -> str:
        """The line of the prompt that offers the tool."""
        kinds = {key: TEXT if isinstance(value, str) else NUMBER for key, value in self.arguments.items()}
        parts = ", ".join(
            f'"{key}": "{kind}"' if kind == TEXT else f'"{key}": {kind}' for key, kind in kinds.items()
        )
        line = f'{{"name": "{self.name}", "arguments": {{{parts}}}}}'
        return f"{line} {self.about}" if self.about else line

    @property
    def call(self) -> str:
        """The assistant's message that makes the call."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return CALL + body + CALL_END

    def tool(self) -> dict:
        """The tool as OpenAI's API takes it."""
        properties = {
            key: {"type": "string" if isinstance(value, str) else "number"}
            for key, value in self.arguments.items()
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": schema},
        }


def offered(uses: list[Use]) -> str:
    """The system message that offers these tools."""
    return "\n".join(["Tools:", *(use.shown for use in uses)])


def result_of(value: str) -> str:
    """A tool's result as the model reads it."""
    return RESULT + value + RESULT_END


def renamed(name: str, rng: random.Random, held_out: bool) -> str:
    """Sometimes another spelling of the name: with a made-up word, in camel case."""
    roll = rng.random()
    if held_out or roll < 0.35:
        word = text.made_up_word(rng, held_out)
        name = rng.choice((f"{name}_{word}", f"{word}_{name}"))
    if rng.random() < 0.12:
        first, *rest = name.split("_")
        name = first + "".join(part.capitalize() for part in rest)
    return name


def value_of(rng: random.Random, held_out: bool) -> str:
    """What a question is about: a made-up word, or one or two ordinary ones."""
    if held_out:
        return text.held_out_value("name", rng)
    roll = rng.random()
    if roll < 0.35:
        return (
            rng.choice(P.ORDINARY_WORDS) if roll < 0.25 else rng.choice(P.REAL[rng.choice(("name", "city"))])
        )
    if roll < 0.65:
        return text.training_value("city", rng)
    value = text.training_value(rng.choice(text.KINDS), rng)
    return value if rng.random() < 0.85 else f"{value} {text.made_up_word(rng)}"


def worded(template: str, rng: random.Random, **values: str) -> str:
    """A question as people type it, now and then with a word around it that says nothing."""
    roll = rng.random()
    if roll < 0.1 and template.startswith(("{D}", "W", "G", "F")):
        template = (
            rng.choice(BEFORE) + template.replace("{D}", "{d}", 1) if "{d}" not in template else template
        )
    elif roll < 0.2:
        template = template[:-1] + rng.choice(AFTER) + template[-1]
    return text.typed(template, rng, **values)


def inflected(verb: str) -> str:
    """The third person of a known verb; a made-up one as it is, since with an ending it might be a held-out word."""
    known = verb in (*VERBS, *ATTRIBUTES, *(verb for verb, _ in ACTIONS))
    return f"{verb.capitalize()}s" if known else verb.capitalize()


def key_of(rng: random.Random, known: Sequence[str]) -> str:
    """What an argument is called: one of the known names, or a made-up one."""
    return rng.choice(known) if rng.random() < 0.7 else text.made_up_word(rng)


def shaped(result: dict, plain: str, rng: random.Random) -> str:
    """A result the way tools give it: words, or a JSON object."""
    return json.dumps(result) if rng.random() < 0.4 else plain


def attribute(rng: random.Random, held_out: bool) -> Use:
    """The price of an item, the age of a person, the anything of anything."""
    known = not held_out and rng.random() < 0.6
    a = rng.choice(ATTRIBUTES) if known else text.made_up_word(rng, held_out)
    h = key_of(rng, HOLDERS)
    v = value_of(rng, held_out)
    roll = rng.random()
    if roll < 0.6:
        found = str(rng.randint(0, 10 ** rng.randint(1, 4)))
    else:
        found = text.made_up_word(rng, held_out)
    about = text.fill(rng.choice(ABOUT_ATTRIBUTE), a=a, h=h)
    asks = ASK_BY_WORD[a] if a in ASK_BY_WORD and rng.random() < 0.4 else ASK_ATTRIBUTE
    question = worded(rng.choice(asks), rng, a=a, v=v, h=h)
    name = f"{h}_{a}" if rng.random() < 0.15 else rng.choice(GETTERS).format(a)
    if rng.random() < 0.15:
        name = renamed(name, rng, held_out)
    value = int(found) if found.isdigit() else found
    plain = rng.choice((found, found, f"The {a} of {v} is {found}."))
    return Use(
        name,
        about,
        {h: v},
        question,
        shaped({a: value}, plain, rng),
        f"The {a} of {v} is {found}.",
        (found,),
        a,
    )


def weather(rng: random.Random, held_out: bool) -> Use:
    """The weather in a city."""
    v = value_of(rng, held_out)
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    name = renamed(rng.choice(GETTERS).format("weather"), rng, held_out and rng.random() < 0.5)
    key = rng.choice(("city", "location", "place", "town", "q", "city_name"))
    question = text.typed(rng.choice(ASK_WEATHER), rng, v=v)
    about = rng.choice(ABOUT_WEATHER)
    roll = rng.random()
    if roll < 0.25:
        plain = rng.choice((sky, f"{sky.capitalize()} in {v}.", f"It is {sky}."))
        return Use(name, about, {key: v}, question, plain, f"The weather in {v} is {sky}.", (sky,), "weather")
    plain = rng.choice((f"{sky}, {degrees} degrees", f"{sky}, {degrees} C", f"{degrees} degrees and {sky}"))
    result = shaped({"temperature": degrees, "condition": sky}, plain, rng)
    return Use(
        name,
        about,
        {key: v},
        question,
        result,
        f"The weather in {v} is {sky}, {degrees} degrees.",
        (sky, str(degrees)),
        "weather",
    )


def clock(rng: random.Random, held_out: bool) -> Use:
    """The time, in a city or here."""
    now = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    name = renamed(
        rng.choice((*GETTERS[:3], "current_{}")).format(rng.choice(("time", "clock"))), rng, held_out
    )
    about = rng.choice(ABOUT_TIME)
    result = shaped({"time": now}, now, rng)
    if rng.random() < 0.4:
        return Use(
            name, about, {}, text.typed(rng.choice(ASK_NOW), rng), result, f"It is {now}.", (now,), "time"
        )
    v = value_of(rng, held_out)
    key = rng.choice(("city", "place", "timezone", "location"))
    return Use(
        name,
        about,
        {key: v},
        text.typed(rng.choice(ASK_TIME), rng, v=v),
        result,
        f"It is {now} in {v}.",
        (now,),
        "time",
    )


def calculation(rng: random.Random, held_out: bool) -> Use:
    """A sum, a product, a difference or something unknown of two numbers: the tool computes it."""
    most = 10 ** rng.randint(1, 3)
    a, b = rng.randint(0, most), rng.randint(0, most)
    if held_out or rng.random() < 0.5:
        verb = text.made_up_word(rng, held_out)
        right, about, asks = rng.randint(0, 9999), f"{verb.capitalize()} two numbers.", ASK_UNKNOWN_SUM
        name = rng.choice((verb, f"{verb}_numbers", f"get_{verb}", f"{verb}_two"))
    else:
        names, about, asks = rng.choice(SUMS)
        right, verb = {"A": a + b, "M": a * b, "S": a - b}[about[0]], ""
        name = renamed(rng.choice(names.split()), rng, held_out)
    x, y = (
        rng.choice(NUMBER_NAMES) if rng.random() < 0.7 else (text.made_up_word(rng), text.made_up_word(rng))
    )
    question = text.typed(rng.choice(asks), rng, a=str(a), b=str(b), d=verb, D=verb.capitalize())
    result = shaped({"result": right}, str(right), rng)
    return Use(
        name,
        rng.choice((about, about, "")),
        {x: a, y: b},
        question,
        result,
        f"The result is {right}.",
        (str(right),),
        about,
    )


def action(rng: random.Random, held_out: bool) -> Use:
    """Something that the assistant is asked to do."""
    verb, thing = rng.choice(ACTIONS)
    if held_out or rng.random() < 0.4:
        verb = text.made_up_word(rng, held_out)
    if rng.random() < 0.3:
        thing = text.made_up_word(rng, held_out)
    v, done = value_of(rng, held_out), rng.choice(DONE)
    name = rng.choice((verb, f"{verb}_{thing}", f"{verb}_{thing}", f"do_{verb}"))
    question = worded(rng.choice(ASK_ACTION), rng, D=verb.capitalize(), d=verb, h=thing, v=v)
    about = rng.choice((f"{verb.capitalize()} a {thing}.", f"{inflected(verb)} a {thing}", ""))
    key = rng.choice((thing, "name", "text", "title"))
    result = shaped({"status": done}, done, rng)
    return Use(name, about, {key: v}, question, result, f"The answer is: {done}.", (done,), verb)


def amount(rng: random.Random, held_out: bool) -> Use:
    """Something that takes one number."""
    verb = rng.choice(VERBS) if rng.random() < 0.5 and not held_out else text.made_up_word(rng, held_out)
    t, u = (w if rng.random() < 0.6 else text.made_up_word(rng, held_out) for w in rng.sample(THINGS, 2))
    n, found = rng.randint(0, 10 ** rng.randint(1, 4)), rng.randint(0, 10 ** rng.randint(1, 4))
    ask = rng.choice(ASK_NUMBER)
    name = rng.choice(
        (f"{verb}_{t}", f"{t}_to_{u}", f"{verb}_{u}", f"{t}_{u}") if "{u}" in ask else (f"{verb}_{t}", verb)
    )
    about = rng.choice(
        (f"{inflected(verb)} {t}.", f"{verb.capitalize()} {t}", f"{u.capitalize()} of {t}.", "")
    )
    question = worded(ask, rng, D=verb.capitalize(), d=verb, t=t, u=u, n=str(n))
    key = t if rng.random() < 0.6 else key_of(rng, ("amount", "value", "number", "n", "count"))
    done = str(found) if "How" in ask or "into" in ask or rng.random() < 0.3 else rng.choice(DONE)
    says = f"The result is {done}." if done.isdigit() else f"The answer is: {done}."
    return Use(name, about, {key: n}, question, shaped({"result": done}, done, rng), says, (done,), t)


def record(rng: random.Random, held_out: bool) -> Use:
    """Something about what has a number."""
    known = not held_out and rng.random() < 0.5
    a = rng.choice(ATTRIBUTES) if known else text.made_up_word(rng, held_out)
    h = rng.choice(HOLDERS) if rng.random() < 0.6 else text.made_up_word(rng, held_out)
    n = rng.randint(0, 10 ** rng.randint(1, 4))
    found = str(rng.randint(0, 9999)) if rng.random() < 0.4 else text.made_up_word(rng, held_out)
    ask = rng.choice(ASK_RECORD)
    name = rng.choice((f"get_{a}", f"{h}_{a}", f"{a}_of_{h}", f"find_{a}")) if "{a}" in ask else f"get_{h}"
    about = rng.choice((f"The {a} of a {h}.", f"Get the {a} of a {h} by number.", ""))
    key = rng.choice((h, f"{h}_id", f"{h}_number", key_of(rng, ("id", "number", "n"))))
    question = worded(ask, rng, a=a, h=h, n=str(n))
    return Use(
        name,
        about,
        {key: n},
        question,
        shaped({a: found}, found, rng),
        f"The result is {found}.",
        (found,),
        a,
    )


def pair(rng: random.Random, held_out: bool) -> Use:
    """Something about two things, or done with them."""
    a = text.made_up_word(rng, held_out) if held_out or rng.random() < 0.6 else rng.choice(ATTRIBUTES)
    v, w = value_of(rng, held_out), value_of(rng, held_out)
    keys = rng.choice(ENDS)
    if rng.random() < 0.4:
        keys = (
            tuple(f"{a}{i}" for i in (1, 2))
            if rng.random() < 0.3
            else (text.made_up_word(rng), text.made_up_word(rng))
        )
    h = rng.choice(HOLDERS)
    question = worded(rng.choice(ASK_PAIR), rng, a=a, d=a, D=a.capitalize(), v=v, w=w, h=h)
    found = str(rng.randint(0, 9999)) if rng.random() < 0.6 else text.made_up_word(rng, held_out)
    about = rng.choice((f"The {a} of two things.", f"{inflected(a)} one and another.", f"{a} of a pair", ""))
    name = rng.choice((a, f"get_{a}", f"{a}_between", f"{a}_of", f"{a}_{h}"))
    return Use(
        name,
        about,
        dict(zip(keys, (v, w))),
        question,
        shaped({a: found}, found, rng),
        f"The result is {found}.",
        (found,),
        a,
    )


SHAPES = (attribute, weather, clock, calculation, action, amount, pair, record)
WEIGHTS = (6, 2, 2, 4, 4, 3, 3, 2)


def uses(rng: random.Random, count: int, held_out: bool = False) -> list[Use]:
    """Tools of different topics, each with a question for it."""
    made: dict[str, Use] = {}
    while len(made) < count:
        use = rng.choices(SHAPES, WEIGHTS)[0](rng, held_out)
        if all(use.name != other.name for other in made.values()):
            made.setdefault(use.topic, use)
    return list(made.values())


def use_tool(talk: text.Talk, use: Use) -> None:
    """The user asks, the assistant calls, the tool returns and the assistant says what."""
    talk.messages += [("user", use.question), ("assistant", use.call)]
    talk.say(result_of(use.result), use.answer, "sure")


def conversation(rng: random.Random, style: str | None = None) -> list:
    """One conversation with tools: calls, and turns between them that need none. Some offer no tool, so that none is called."""
    talk = text.Talk(rng, style)
    if rng.random() < 0.3:
        without_tools(talk)
        return talk.messages
    tools = uses(rng, rng.choice((1, 2, 2, 3, 4, 4, 6)))
    talk.messages.append(("system", offered(tools)))
    if rng.random() < 0.4:
        talk.messages.append(("system", rng.choice((*P.SYSTEMS, "Use the tools to answer questions."))))
    asked = rng.sample(tools, min(len(tools), rng.choice((1, 2, 3, 4, 6))))
    told = rng.choice(text.KINDS) if rng.random() < 0.3 else None
    if told:
        talk.tell(told)
    elif rng.random() < 0.35:
        talk.distract()
    for use in asked:
        use_tool(talk, use)
        if rng.random() < 0.15:
            talk.distract()
    if rng.random() < 0.2:
        unoffered(talk, tools)
    if told:
        talk.recall(told)
    return talk.messages


def without_tools(talk: text.Talk) -> None:
    """Questions that only a tool could answer, where none is offered."""
    rng = talk.rng
    if rng.random() < 0.4:
        talk.messages.append(("system", rng.choice(P.SYSTEMS)))
    for _ in range(rng.randint(1, 5)):
        shape = rng.choices(SHAPES, WEIGHTS)[0]
        if shape is calculation or rng.random() < 0.2:
            talk.distract()
        else:
            talk.say(shape(rng, False).question, rng.choice(P.DO_NOT_KNOW), "sorry")


def unoffered(talk: text.Talk, tools: list[Use]) -> None:
    """A question that only a tool could answer which is not offered."""
    other = talk.rng.choice((attribute, action, weather))(talk.rng, False)
    if other.topic not in {use.topic for use in tools}:
        talk.say(other.question, NO_TOOL, "sorry")


def idle_probe(rng: random.Random) -> list:
    """Tools are offered, and the last message needs none of them: a chat turn, or a fact told or asked for."""
    talk = text.Talk(rng, None, text.held_out_value)
    talk.messages.append(("system", offered(uses(rng, rng.randint(1, 4), held_out=True))))
    kind = rng.choice(text.KINDS)
    if rng.random() < 0.5:
        talk.tell(kind)
        if rng.random() < 0.5:
            talk.recall(kind)
    else:
        rng.choice((text.small_talk, text.fact, text.remark, text.joke))(talk)
    return talk.messages[:-1]
