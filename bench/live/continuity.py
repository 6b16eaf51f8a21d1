"""How much of a follow-up prompt hits the KV blocks that the turn before left, when ids are kept and when text is encoded again.

    python -m bench.live.continuity [--data FOLDER] [--tokenizer FOLDER] [--turns 96]

FOLDER holds `mtbench101.jsonl.zst` and `oasst_en_100_tree.jsonl.zst` (conversations with text, Apache-2.0); without it a few
conversations are made up. Recorded answers are text. What a model would have sampled for them is not known, so their ids are made in three
ways: the tokenizer's own (0%), and with 1% or 5% of the tokens of several characters split in two, as a sampler may spell them. No
engine runs for these: a follow-up hits the whole blocks that its ids have in common with the ids before, which is how vLLM's prefix
cache counts, and nothing is ever evicted. Then the demo model answers `--turns` turns at temperature 1 through the engine: there
the ids are real, and the hits are the engine's own count. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.data import MT_BENCH, OASST, lines_of
from bench.live.report import options, report
from engine_bridge.calls.continuity import continue_prompt
from engine_bridge.driver.engine.building import CPU_BLOCK_SIZE_TOKENS, configure_environment
from engine_bridge.protocol.node import (
    ChatMessage,
    GenerateRequest,
    RequestId,
    Sampling,
    pack_token_ids,
    unpack_token_ids,
)
from engine_bridge.protocol.request_context import RequestContext
from gateway.app import engine_config, node_config
from gateway.settings.config import DEMO_MODEL_DIR, Config

BLOCK = CPU_BLOCK_SIZE_TOKENS
SPLIT_SHARES = (0.0, 0.01, 0.05)
TURNS_PER_TALK = 6
Conversation = list[tuple[str, str]]
"""(question, answer) pairs."""


# -- conversations -------------------------------------------------------------------------------------------------------------------


def conversations(folder: Path | None) -> list[Conversation]:
    """Of two turns or more."""
    if folder is None:
        return made_up()
    bench = [
        [(turn["user"], turn["bot"]) for turn in talk["history"]]
        for talk in map(json.loads, lines_of(folder / MT_BENCH.name))
    ]
    trees = [best_path(tree["prompt"]) for tree in map(json.loads, lines_of(folder / OASST.name))]
    return [talk for talk in bench + trees if len(talk) > 1]


def best_path(message: dict[str, Any]) -> Conversation:
    """The first reply to the first reply, and so on: trees are sorted by how people ranked them."""
    texts = [message["text"]]
    while message["replies"]:
        message = message["replies"][0]
        texts.append(message["text"])
    return list(zip(texts[::2], texts[1::2], strict=False))


def made_up() -> list[Conversation]:
    rng = random.Random(0)
    words = (
        "the a river mountain walks quietly over under seven bright stones while nobody listens today".split()
    )

    def sentence(num_words: int) -> str:
        return " ".join(rng.choice(words) for _ in range(num_words)).capitalize() + "."

    return [[(sentence(12), sentence(60)) for _ in range(5)] for _ in range(40)]


# -- token arithmetic ----------------------------------------------------------------------------------------------------------------


def num_hit(left: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of `prompt` that vLLM's prefix cache has after a request left these ids: whole blocks, and never the last token.

    The last id of `left` was sampled and never went through the model.
    """
    usable = min(len(left) - 1, len(prompt) - 1)
    same = next((at for at in range(usable) if left[at] != prompt[at]), usable)
    return same // BLOCK * BLOCK


@dataclass
class Hits:
    """Sums over follow-up prompts, in tokens. `possible`: with every id of the turn before, as far as blocks allow."""

    num_prompts: int = 0
    prompt: int = 0
    hit: int = 0
    possible: int = 0
    origins: Counter[str] = field(default_factory=Counter)

    def note(self, left: Sequence[int], prompt: Sequence[int], origin: str) -> None:
        self.num_prompts += 1
        self.prompt += len(prompt)
        self.hit += num_hit(left, prompt)
        self.possible += min(len(left) - 1, len(prompt) - 1) // BLOCK * BLOCK
        self.origins[origin] += 1

    @property
    def share(self) -> float:
        return round(self.hit / self.prompt, 4)


def messages_of(talk: Conversation, question: str) -> tuple[ChatMessage, ...]:
    """As the gateway makes them: an empty answer is left out."""
    said = [
        ChatMessage(role, text)
        for turn in talk
        for role, text in zip(("user", "assistant"), turn, strict=True)
        if text or role == "user"
    ]
    return (*said, ChatMessage("user", question))


class Chat:
    """A tokenizer with its chat template, and other spellings of what it encodes."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer
        from vllm.renderers.hf import _detect_content_format

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        # The demo's template trims plain strings and leaves parts as they are, so it matters which of them vLLM hands over.
        self._has_parts = _detect_content_format(self.tokenizer.chat_template, default="string") == "openai"
        self._ids = self.tokenizer.get_vocab()
        self._names = {number: name for name, number in self._ids.items()}
        self._special = set(self.tokenizer.all_special_ids)

    def render(self, talk: Conversation, question: str) -> str:
        messages = [
            {
                "role": said.role,
                "content": [{"type": "text", "text": said.content}] if self._has_parts else said.content,
            }
            for said in messages_of(talk, question)
        ]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sampled(self, text: str, share: float, rng: random.Random) -> list[int]:
        """Ids that say `text`, with this share of the tokens of several characters split in two, and the end of the answer."""
        ids: list[int] = []
        for token in self.encode(text):
            is_split = token not in self._special and rng.random() < share
            ids += (self._split(token, rng) if is_split else None) or [token]
        return [*ids, self.tokenizer.eos_token_id]

    def _split(self, token: int, rng: random.Random) -> list[int] | None:
        """Two tokens that together are this one; None for one that cannot be split so."""
        name = self._names[token]
        halves = [(name[:at], name[at:]) for at in range(1, len(name))]
        halves = [pair for pair in halves if all(half in self._ids for half in pair)]
        return [self._ids[half] for half in rng.choice(halves)] if halves else None


def simulate(chat: Chat, talks: Sequence[Conversation], share: float) -> dict[str, Hits]:
    """Both ways over the same conversations and the same spellings."""
    hits = {"continuity": Hits(), "text": Hits()}
    rng = random.Random(1)
    for talk in talks:
        left: dict[str, list[int]] = {}
        for number, (question, answer) in enumerate(talk):
            text = chat.render(talk[:number], question)
            rendered, answered = chat.encode(text), chat.sampled(answer, share, rng)
            prompts = {"continuity": rendered, "text": rendered}
            if number:
                made = continue_prompt(left["continuity"], text, rendered, chat.tokenizer)
                prompts["continuity"] = made.token_ids
                hits["continuity"].note(left["continuity"], made.token_ids, made.origin)
                hits["text"].note(left["text"], rendered, "rendered")
            left = {way: prompt + answered for way, prompt in prompts.items()}
    return hits


# -- the demo model ------------------------------------------------------------------------------------------------------------------


def questions(talks: Sequence[Conversation], num_turns: int) -> Iterator[list[str]]:
    """Conversations of TURNS_PER_TALK short questions."""
    short = [question for talk in talks for question, _ in talk if len(question) < 200][:num_turns]
    for at in range(0, len(short), TURNS_PER_TALK):
        yield short[at : at + TURNS_PER_TALK]


async def with_the_model(chat: Chat, talks: Sequence[Conversation], num_turns: int) -> dict[str, Any]:
    """Real answers at temperature 1. The engine runs with continuity; what text would have hit is counted beside it."""
    from engine_bridge.local_node import LocalNode

    hits = {"continuity": Hits(), "text": Hits()}
    num_answers = num_respelt = engine_hit = 0
    with tempfile.TemporaryDirectory() as folder:
        node = LocalNode(node_config(Config(model=str(DEMO_MODEL_DIR), data_dir=Path(folder))))
        await node.start()
        for number, asked in enumerate(questions(talks, num_turns)):
            talk: Conversation = []
            left: list[int] = []
            for question in asked:
                answer = await ask(node, f"{number}-{len(talk)}", talk, question, left)
                if talk:
                    hits["continuity"].note(left, answer.prompt, answer.origin)
                    hits["text"].note(left, chat.encode(chat.render(talk, question)), "rendered")
                    engine_hit += answer.num_cached
                generated = [token for token in answer.generated if token != chat.tokenizer.eos_token_id]
                num_answers += 1
                num_respelt += chat.encode(answer.text) != generated
                left = answer.prompt + answer.generated
                talk.append((question, answer.text))
        await node.close()
    agrees = engine_hit == hits["continuity"].hit
    return {"hits": hits, "respelt": num_respelt / num_answers, "engine_agrees": agrees}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine read and wrote. num_cached: prompt tokens that it did not compute."""

    text: str
    prompt: list[int]
    generated: list[int]
    origin: str
    num_cached: int


async def ask(node: Any, name: str, talk: Conversation, question: str, left: list[int]) -> Answer:
    request = GenerateRequest(
        request_id=RequestId(name),
        messages=messages_of(talk, question),
        sampling=Sampling(temperature=1.0, max_tokens=100, seed=1),
        history_token_ids=pack_token_ids(left),
        # What conversations have in common is not the question here.
        context=RequestContext(tenant=name.partition("-")[0]),
    )
    deltas = [delta async for delta in node.generate(request)]
    prompt = deltas[-1].prompt
    return Answer(
        text="".join(delta.text for delta in deltas),
        prompt=list(unpack_token_ids(prompt.token_ids)),
        generated=[token for delta in deltas for token in delta.token_ids],
        origin=prompt.origin,
        num_cached=deltas[-1].usage.cached_tokens,
    )


# -- report --------------------------------------------------------------------------------------------------------------------------


def show(cases: dict[str, dict[str, Hits]], real: dict[str, Any]) -> None:
    rows, result = [], {"continuity": {}, "text": {}}
    for name, hits in cases.items():
        for way, counted in hits.items():
            result[way][name] = counted.share
            ceiling = f"blocks allow {counted.possible / counted.prompt:.4f}"
            origins = ", ".join(f"{origin} {count}" for origin, count in counted.origins.items())
            what = f"{name}, {way}: share of {counted.num_prompts} follow-up prompts"
            rows.append((what, f"{counted.share:.4f}", f"{ceiling}; {origins}"))
    rows.append(("real answers that encode to other ids", f"{real['respelt']:.3f}", ""))
    rows.append(("engine counts the same hits", str(real["engine_agrees"]).lower(), "aim true"))
    first = next(iter(cases.values()))["continuity"]
    extra = {
        "num_follow_ups": first.num_prompts,
        "num_follow_ups_real": real["hits"]["text"].num_prompts,
        "block_size_tokens": BLOCK,
        "respelt_answer_share": round(real["respelt"], 3),
        "engine_agrees": real["engine_agrees"],
    }
    report("token continuity", rows, {"follow_up_hit_share": result} | extra)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, help="folder of recorded conversations")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL_DIR, help="for the recorded ones")
    parser.add_argument("--turns", type=int, default=96, help="turns that the demo model answers")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    configure_environment(engine_config(Config(model=str(DEMO_MODEL_DIR))))
    talks, chat = conversations(args.data), Chat(args.tokenizer)
    cases = {f"split_{share:.0%}": simulate(chat, talks, share) for share in SPLIT_SHARES}
    demo = chat if args.tokenizer == DEMO_MODEL_DIR else Chat(DEMO_MODEL_DIR)
    real = asyncio.run(with_the_model(demo, talks, args.turns))
    show(cases | {"real": real["hits"]}, real)


if __name__ == "__main__":
    main()
