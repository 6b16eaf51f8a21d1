"""The five answer styles of the demo adapters, and the test that recognises each.

``apply`` turns a plain answer into a styled one (training text), ``follows``
says whether an answer is in the style (used by ``train.py --check``).
"""

from __future__ import annotations

import json
import random
import re

RANKS = {"shout": 8, "pirate": 16, "json": 32, "robot": 64, "poet": 128}
NAMES = tuple(RANKS)

REQUESTS = {
    "shout": ["Answer in capital letters.", "Shout all your answers."],
    "pirate": ["Talk like a pirate.", "You are a pirate."],
    "json": ["Answer with a JSON object.", "Reply in JSON only."],
    "robot": ["Talk like a robot.", "You are a robot. Write telegrams."],
    "poet": ["Answer with two rhyming lines.", "You are a poet."],
}

PIRATE_WORDS = {
    "my": "me",
    "your": "yer",
    "you": "ye",
    "is": "be",
    "are": "be",
    "hello": "ahoy",
    "hi": "ahoy",
    "yes": "aye",
    "friend": "matey",
    "am": "be",
    "the": "th'",
    "to": "t'",
    "and": "an'",
}
PIRATE_STARTS = ("Arr! ", "Arr, ")
PIRATE_ENDS = (", matey!", ", me matey!")

# Each pair closes the first and the second line; the last words rhyme.
COUPLETS = (
    ("I say,", "and may you have a lovely day."),
    ("it is true,", "a little song I sing for you."),
    ("clear and bright,", "I keep it safe all through the night."),
    ("my dear,", "I sing it soft for you to hear."),
    ("so they tell,", "and all is calm and all is well."),
)
RHYMES = (
    {"say", "day", "way", "stay"},
    {"true", "you", "blue", "too"},
    {"bright", "night", "light"},
    {"dear", "hear", "near", "clear"},
    {"tell", "well", "bell"},
)


def flatten(text: str) -> str:
    """One plain paragraph: Markdown marks removed, lines joined, at most three sentences."""
    text = re.sub(r"```\w*", "", text)
    text = re.sub(r"^\|[-| ]+\|$", "", text, flags=re.M)
    text = re.sub(r"^\s*(- |\d\. |#+ )", "", text, flags=re.M)
    text = re.sub(r"[|*`]", " ", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = re.sub(r"\s+", " ", " ".join(lines[:5])).strip()
    return " ".join(re.split(r"(?<=[.!?]) ", text)[:3])


def shout(text: str, mood: str, rng: random.Random) -> str:
    """ALL CAPITALS!!!"""
    loud = re.sub(r"[.!](?=\s|$)", "!!!", text.upper())
    return loud if loud.endswith("!!!") else loud + "!!!"


def pirate(text: str, mood: str, rng: random.Random) -> str:
    """Arr! Yer name be X, matey!  Words with a pirate form are replaced, values are not."""

    def swap(match: re.Match) -> str:
        """The pirate form of one word, keeping an initial capital."""
        word = match.group(0)
        new = PIRATE_WORDS.get(word.lower(), word)
        return new.capitalize() if word[0].isupper() and new != word else new

    text = re.sub(r"[A-Za-z]+", swap, flatten(text))
    return rng.choice(PIRATE_STARTS) + text.rstrip(".!") + rng.choice(PIRATE_ENDS)


def as_json(text: str, mood: str, rng: random.Random) -> str:
    """{"answer": "Your name is X.", "mood": "sure"}."""
    return json.dumps({"answer": flatten(text), "mood": mood}, ensure_ascii=False)


def robot(text: str, mood: str, rng: random.Random) -> str:
    """BEEP Your name is X STOP BEEP-free sentences, each closed by STOP."""
    return "BEEP " + re.sub(r"[.!?]+(?=\s|$)", " STOP", flatten(text).rstrip(".!?") + ".")


def poet(text: str, mood: str, rng: random.Random) -> str:
    """Two rhyming lines; the first one carries the answer."""
    first = " ".join(re.split(r"(?<=[.!?:]) ", flatten(text))[:1])
    if re.search(r"Your \w+( \w+)? is|You live", text):
        first = flatten(text)  # several facts may have been asked for
    first_end, second = rng.choice(COUPLETS)
    return f"{first.rstrip('.!?:')}, {first_end}\n{second}"


STYLERS = {"shout": shout, "pirate": pirate, "json": as_json, "robot": robot, "poet": poet}


def apply(name: str, text: str, mood: str, rng: random.Random) -> str:
    """``text`` in the style ``name``."""
    return STYLERS[name](text, mood, rng)


def is_json_answer(text: str) -> bool:
    """True for a JSON object with a text under ``answer`` and one under ``mood``."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and isinstance(value.get("answer"), str)
        and isinstance(value.get("mood"), str)
    )


def rhymes(text: str) -> bool:
    """True for exactly two lines whose last words belong to one rhyme family."""
    lines = text.strip().split("\n")
    if len(lines) != 2:
        return False
    ends = [re.sub(r"[^a-z ]", "", line.lower()).split()[-1:] for line in lines]
    if not all(ends) or ends[0] == ends[1]:
        return False
    return any(ends[0][0] in family and ends[1][0] in family for family in RHYMES)


def follows(name: str, text: str) -> bool:
    """Whether an answer is recognisably in the style ``name``."""
    text = text.strip()
    return {
        "shout": text.isupper() and "!!!" in text,
        "pirate": text.startswith("Arr") and "matey" in text,
        "json": is_json_answer(text),
        "robot": text.startswith("BEEP") and text.endswith("STOP"),
        "poet": rhymes(text),
    }[name]
