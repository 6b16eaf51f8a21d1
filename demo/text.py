"""The training text of the demo model: seeded, generated, never downloaded.

A conversation is a list of ``(role, text)`` pairs, role being ``system``,
``user`` or ``assistant``.  The model has to hold a little small talk and to
remember what it was told, so most conversations tell it a name, a city or a
secret word and ask for it again some turns later.  The values are made-up
words: a model that has only ever seen each word once can answer only by
copying it from the conversation.

One made-up word in eight is *held out* (decided by a checksum of the word, so
no list has to be stored).  Training text never contains a held-out word and
``train.py --check`` uses nothing else.

The fixed sentences live in ``phrases.py`` and the answer styles in
``styles.py``; this module only combines them.
"""

from __future__ import annotations

import random
import zlib

import phrases as P
import styles

ONSETS = ("b c d f g h j k l m n p r s t v w z br cr dr fl gr kl pl pr sk sl st th tr sh ch qu y").split()
VOWELS = "a a e e i i o o u u ai ea oo ie y au".split()
CODAS = ["", "", "", *"n r l s t k m x nd rt sk p b g".split()]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KINDS = ("name", "city", "secret")
EXTRA_KINDS = ("pet", "color")  # more slots to keep apart, so the model learns which is which


# --------------------------------------------------------------------------- words


def is_held_out(word: str) -> bool:
    """True for the one word in eight that training must never see (case is ignored)."""
    return zlib.crc32(word.lower().encode()) % 8 == 0


def raw_word(rng: random.Random) -> str:
    """A made-up lower-case word of 3 to 10 letters: mostly syllables, sometimes plain letters."""
    if rng.random() < 0.12:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(4, 7)))
    while True:
        word = "".join(
            rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        )
        if 3 <= len(word) <= 10:
            return word


def made_up_word(rng: random.Random, held_out: bool = False) -> str:
    """A made-up lower-case word from the training side or from the held-out side."""
    while True:
        word = raw_word(rng)
        if is_held_out(word) == held_out and word not in P.known_words():
            return word


def recase(word: str, rng: random.Random, lower: float) -> str:
    """Capitalise ``word``, or leave it lower-case with probability ``lower``; rarely all caps."""
    roll = rng.random()
    if roll < lower:
        return word
    return word.upper() if roll > 0.96 else word.capitalize()


def training_value(kind: str, rng: random.Random) -> str:
    """A value for a fact of this kind: three in four made up, the others ordinary ones."""
    if kind == "color":
        return rng.choice(P.COLORS) if rng.random() < 0.6 else made_up_word(rng)
    lower = 0.4 if kind == "secret" else 0.12
    if kind != "secret" and rng.random() < 0.04:
        return f"{made_up_word(rng).capitalize()} {made_up_word(rng).capitalize()}"
    if rng.random() < 0.76:
        return recase(made_up_word(rng), rng, lower)
    if kind == "secret":
        if rng.random() < 0.35:
            return "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
        return recase(rng.choice(P.ORDINARY_WORDS), rng, 0.7)
    value = rng.choice(P.REAL[kind])
    return value.lower() if rng.random() < lower else value


def held_out_value(kind: str, rng: random.Random) -> str:
    """A held-out word the way a person would type it: secrets are lower-case half of the time."""
    word = made_up_word(rng, held_out=True)
    return word if kind == "secret" and rng.random() < 0.5 else word.capitalize()


# --------------------------------------------------------------------------- one turn


def sloppy(text: str, rng: random.Random) -> str:
    """Type ``text`` the way people do: now and then without capital, comma or full stop."""
    if rng.random() < 0.25 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.25 and not text.split()[0][1:2].isupper():
        text = text[0].lower() + text[1:]
    if rng.random() < 0.08:
        text = text.lower()
    if rng.random() < 0.1:
        text = text.replace("'", "")
    return text


def fill(template: str, **values: str) -> str:
    """``str.format`` that also accepts templates containing other braces."""
    for key, value in values.items():
        template = template.replace("{" + key + "}", value)
    return template


def typed(template: str, rng: random.Random, **values: str) -> str:
    """A user sentence: the template typed sloppily, the values left exactly as they are."""
    first_is_value = template.startswith("{")
    text = template if first_is_value else sloppy(template, rng)
    return fill(text, **values)


class Talk:
    """A conversation under construction: the messages so far and the facts known so far."""

    def __init__(self, rng: random.Random, style: str | None = None, value=training_value):
        self.rng, self.value = rng, value
        self.style = style
        self.known: dict[str, str] = {}
        self.messages: list[tuple[str, str]] = []

    def say(self, user: str, reply: str, mood: str = "happy") -> None:
        """Append one user message and its answer, the latter in the conversation's style."""
        if self.style:
            reply = styles.apply(self.style, reply, mood, self.rng)
        self.messages += [("user", user), ("assistant", reply)]

    def tell(self, kind: str, value: str | None = None) -> None:
        """The user states one fact; a second statement of the same kind is a correction."""
        rng, again = self.rng, kind in self.known
        value = value or self.value(kind, rng)
        asks = P.CORRECT[kind] if again else P.TELL[kind]
        acks = P.CORRECT_ACK[kind] if again else P.TELL_ACK[kind]
        old = self.known.get(kind, "")
        self.known[kind] = value
        self.say(typed(rng.choice(asks), rng, x=value, old=old), fill(rng.choice(acks), x=value))

    def tell_many(self, kinds: list[str]) -> None:
        """The user states two or three facts in a single message."""
        rng = self.rng
        for kind in kinds:
            self.known[kind] = self.value(kind, rng)
        joined = rng.choice((" and ", ". ", ", ", ", and ", ". Also, "))
        parts = [rng.choice(P.TELL_SHORT[k]) for k in kinds]
        text = parts[0]
        for part in parts[1:]:
            starts = part[0].upper() + part[1:] if joined == ". " else part
            text += joined + starts
        text = rng.choice(P.OPENERS) + text + rng.choice((".", ".", "", "!"))
        filled = fill(text, **{k: self.known[k] for k in kinds})
        echo = " ".join(fill(P.RECALL[k][0], x=self.known[k]) for k in kinds)
        reply = rng.choice(P.MANY_ACK) + (" " + echo if rng.random() < 0.7 else "")
        self.say(filled, reply)

    def recall(self, kind: str) -> None:
        """The user asks for a fact; the answer repeats it or admits that it was never told."""
        rng = self.rng
        ask = typed(rng.choice(P.ASK[kind]), rng)
        if kind not in self.known:
            self.say(ask, rng.choice(P.UNKNOWN[kind]), "sorry")
            return
        lead = "Yes, " if ask.lower().startswith(("do you", "can you remember")) else ""
        answer = fill(rng.choice(P.RECALL[kind]), x=self.known[kind])
        self.say(ask, lead + (answer[0].lower() + answer[1:] if lead else answer), "sure")

    def recall_all(self) -> None:
        """The user asks for everything (or for two things); answered in a fixed order."""
        rng = self.rng
        have = [k for k in KINDS if k in self.known]
        pair = tuple(sorted(rng.sample(KINDS, 2), key=KINDS.index))
        if rng.random() < 0.4 and all(k in self.known for k in pair):
            have = list(pair)
            ask = typed(fill(rng.choice(P.ASK_PAIR), a=P.NOUN[pair[0]], b=P.NOUN[pair[1]]), rng)
        else:
            ask = typed(rng.choice(P.ASK_ALL), rng)
        reply = " ".join(fill(P.RECALL[k][0], x=self.known[k]) for k in have)
        self.say(ask, reply or "You have not told me anything about you yet.", "sure" if have else "sorry")

    def spell(self) -> None:
        """Capital letters and spelling: exercises that teach which letters belong together."""
        rng = self.rng
        kinds = [k for k in KINDS if k in self.known]
        kind = rng.choice(kinds) if kinds else "word"
        word = self.known.get(kind) or made_up_word(rng).capitalize()
        ask, answer = rng.choice(P.SPELLING)
        noun = "my " + P.NOUN[kind] if kinds else "the word " + word
        self.say(
            typed(fill(ask, noun=noun), rng),
            fill(answer, upper=word.upper(), lower=word.lower(), x=word, spelled="-".join(word.upper())),
        )

    def echo(self) -> None:
        """The user asks for a word or two to be repeated."""
        rng = self.rng
        words = [recase(made_up_word(rng), rng, 0.5) for _ in range(rng.choice((1, 1, 2, 3)))]
        self.say(typed(rng.choice(P.ECHO), rng, x=" ".join(words)), " ".join(words))

    def distract(self, long: bool = False) -> None:
        """A turn that has nothing to do with the facts: small talk, a sum, a list, a story."""
        pick = self.rng.choices(DISTRACTORS, LONG_WEIGHTS if long else SHORT_WEIGHTS)[0]
        pick(self)


# --------------------------------------------------------------------------- distractors


def small_talk(talk: Talk) -> None:
    """Greetings, thanks, questions about the model."""
    asks, replies = talk.rng.choice(P.SMALL_TALK)
    talk.say(typed(talk.rng.choice(asks), talk.rng), talk.rng.choice(replies))


def fact(talk: Talk) -> None:
    """A question with one right answer."""
    asks, reply = talk.rng.choice(P.FACTS)
    talk.say(typed(talk.rng.choice(asks), talk.rng), reply, "sure")


def capital(talk: Talk) -> None:
    """The capital of a country."""
    country, city = talk.rng.choice(P.CAPITALS)
    if talk.rng.random() < 0.12:
        unknown = made_up_word(talk.rng).capitalize()
        talk.say(typed(talk.rng.choice(P.ASK_CAPITAL), talk.rng, c=unknown), P.DO_NOT_KNOW[0], "sorry")
        return
    ask = typed(talk.rng.choice(P.ASK_CAPITAL), talk.rng, c=country)
    talk.say(ask, f"The capital of {country} is {city}.", "sure")


def arithmetic(talk: Talk) -> None:
    """A sum, a difference or a product of small numbers."""
    rng = talk.rng
    sign = rng.choice("++-*")
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if sign == "-" and a < b:
        a, b = b, a
    result = a + b if sign == "+" else a - b if sign == "-" else a * b
    spoken = rng.choice({"+": ("+", "plus"), "-": ("-", "minus"), "*": ("*", "times")}[sign])
    ask = fill(rng.choice(P.ASK_SUM), s=f"{a} {spoken} {b}")
    talk.say(ask, f"{a} {spoken} {b} is {result}.", "sure")


def remark(talk: Talk) -> None:
    """The user mentions other people and places, which must not be mistaken for the facts."""
    rng = talk.rng
    text, reply = rng.choice(P.REMARKS)
    values = {k: rng.choice(v) for k, v in P.REMARK_SLOTS.items()}
    values["w"] = recase(made_up_word(rng), rng, 0.1)
    talk.say(typed(text, rng, **values), fill(reply, **values))


def do_not_know(talk: Talk) -> None:
    """A question beyond a model this small."""
    rng = talk.rng
    roll = rng.random()
    if roll < 0.5:
        thing = rng.choice(P.HARD_THINGS)
    elif roll < 0.75:
        thing = recase(made_up_word(rng), rng, 0.5)
    else:
        thing = " ".join(rng.sample(P.ORDINARY_WORDS, rng.randint(1, 3)))
    talk.say(typed(rng.choice(P.HARD_QUESTIONS), rng, t=thing), rng.choice(P.DO_NOT_KNOW), "sorry")


def joke(talk: Talk) -> None:
    """A joke."""
    talk.say(typed(talk.rng.choice(P.ASK_JOKE), talk.rng), talk.rng.choice(P.JOKES))


def markdown(talk: Talk) -> None:
    """A longer answer with a list, a table or a block of code."""
    asks, reply = talk.rng.choice(P.MARKDOWN)
    talk.say(typed(talk.rng.choice(asks), talk.rng), reply)


def short_story(talk: Talk) -> None:
    """A story of about forty words."""
    talk.say(typed(talk.rng.choice(P.ASK_STORY), talk.rng), story(talk.rng, long=False))


def long_story(talk: Talk) -> None:
    """A story of well over a hundred and fifty tokens."""
    talk.say(typed(talk.rng.choice(P.ASK_LONG_STORY), talk.rng), story(talk.rng, long=True))


def story(rng: random.Random, long: bool) -> str:
    """A story from interchangeable sentences; the hero stays the same throughout."""
    slots = {k: rng.choice(v) for k, v in P.STORY_SLOTS.items()}
    paragraphs = P.LONG_STORY if long else P.SHORT_STORY
    return "\n\n".join(
        " ".join(fill(rng.choice(options), **slots) for options in paragraph) for paragraph in paragraphs
    )


DISTRACTORS = (
    small_talk,
    fact,
    capital,
    arithmetic,
    remark,
    do_not_know,
    joke,
    markdown,
    short_story,
    long_story,
    Talk.spell,
    Talk.echo,
)
SHORT_WEIGHTS = (30, 14, 6, 20, 24, 8, 5, 1.5, 1, 0.3, 4, 4)
LONG_WEIGHTS = (20, 10, 5, 14, 6, 6, 7, 22, 7, 7, 1, 1)


# --------------------------------------------------------------------------- conversations


def dense(talk: Talk, turns: int) -> None:
    """Facts and questions in quick succession: many chances to copy per token."""
    rng = talk.rng
    for _ in range(turns):
        missing = [k for k in KINDS + EXTRA_KINDS if k not in talk.known]
        roll = rng.random()
        if (roll < 0.3 and missing) or not talk.known:
            talk.tell(rng.choice([k for k in missing if k in KINDS] or missing))
        elif roll < 0.4:
            talk.tell(rng.choice(list(talk.known)))
        elif roll < 0.72:
            talk.recall(rng.choice(list(talk.known)))
        elif roll < 0.78:
            talk.recall(rng.choice(KINDS))
        elif roll < 0.84:
            talk.recall_all()
        else:
            talk.distract()


def distant(talk: Talk, turns: int, wordy: bool = False) -> None:
    """Facts first, then ``turns`` other turns, then a question about each fact.

    ``wordy`` conversations are full of lists and stories, up to about 1300 tokens.
    """
    rng = talk.rng
    kinds = rng.sample(KINDS, rng.choice((1, 2, 3, 3)))
    if len(kinds) > 1 and rng.random() < 0.3:
        talk.tell_many(kinds)
    else:
        for kind in kinds:
            talk.tell(kind)
            if rng.random() < 0.15:
                talk.distract()
    if rng.random() < 0.15:
        talk.tell(rng.choice(kinds))
    for _ in range(turns):
        talk.distract(long=wordy)
    if len(kinds) > 1 and rng.random() < 0.25:
        talk.recall_all()
    for kind in rng.sample(kinds, len(kinds)):
        talk.recall(kind)
    if rng.random() < 0.15:
        talk.recall(rng.choice(KINDS))


def chatty(talk: Talk, turns: int) -> None:
    """No facts to remember: small talk and the longer answers."""
    for _ in range(turns):
        talk.distract(long=True)
    if talk.rng.random() < 0.1:
        talk.recall(talk.rng.choice(KINDS))


def conversation(rng: random.Random, progress: float = 1.0, style: str | None = None) -> list:
    """One training conversation.

    ``progress`` runs from 0 to 1 over training: early conversations are short,
    later ones put up to eleven other turns between a fact and its question.
    With ``style`` every answer is in that style (for the adapters); without,
    one conversation in eight asks for a style in its system message.
    """
    asked = style is None and rng.random() < 0.125
    talk = Talk(rng, style or (rng.choice(styles.NAMES) if asked else None))
    if asked:
        talk.messages.append(("system", rng.choice(styles.REQUESTS[talk.style])))
    elif rng.random() < 0.25:
        talk.messages.append(("system", rng.choice(P.SYSTEMS)))
    furthest = 2 + int(10 * min(1.0, 1.6 * progress))
    roll = rng.random()
    if roll < 0.36:
        dense(talk, rng.randint(2, 3 + furthest // 2))
    elif roll < 0.74:
        distant(talk, rng.randint(0, furthest), wordy=rng.random() < 0.2 * progress)
    else:
        chatty(talk, rng.randint(1, 1 + furthest // 3))
    return talk.messages


def recall_probe(rng: random.Random, kind: str, distance: int, style=None) -> tuple[list, str]:
    """Messages ending in a question for a held-out value told ``distance`` user turns earlier."""
    talk = Talk(rng, style, held_out_value)
    talk.tell(kind)
    for _ in range(distance - 1):
        talk.distract()
    talk.recall(kind)
    return talk.messages[:-1], talk.known[kind]


def multi_probe(rng: random.Random, between: int, corrected: bool) -> tuple[list, list, dict]:
    """Three held-out facts, ``between`` other turns, then the questions still to be asked.

    Returns the opening messages, the three user questions in random order with
    their kinds, and the expected value of each kind.
    """
    talk = Talk(rng, None, held_out_value)
    for kind in rng.sample(KINDS, 3):
        talk.tell(kind)
    if corrected:
        talk.tell(rng.choice(KINDS))
    for _ in range(between):
        talk.distract()
    opening = len(talk.messages)
    kinds = rng.sample(KINDS, 3)
    for kind in kinds:
        talk.recall(kind)
    questions = [text for role, text in talk.messages[opening:] if role == "user"]
    return talk.messages[:opening], list(zip(kinds, questions)), dict(talk.known)
