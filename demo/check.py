"""Measures the demo model: recall of held-out words by distance, tool calls, and the styles.

All answers are greedy.  Prompts are answered in batches sorted by length.
"""

from __future__ import annotations

import json
import pathlib
import random
import time

import network
import styles
import text
import tool_talks
import torch
import vocab
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

DISTANCES = range(1, 11)  # user turns between a fact and the question for it
OPEN_QUESTIONS = [
    "Hello!",
    "How are you?",
    "What can you do?",
    "Thank you!",
    "Tell me a joke.",
    "What is the capital of France?",
    "What is 3 + 4?",
    "I like pizza.",
    "What color is the sky?",
    "Who are you?",
    "Goodbye!",
    "I am tired.",
]


def load(folder: pathlib.Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """The saved base model (weights widened to float32) and its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "model_type", "torch_dtype", "use_cache"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa"))
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    missing = model.load_state_dict(tensors, strict=False)
    if set(missing.missing_keys) - {"lm_head.weight"} or missing.unexpected_keys:
        raise ValueError(f"{folder}: weights do not fit: {missing}")
    model.tie_weights()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


class Answerer:
    """Greedy answers for many conversations at a time."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.encoder = vocab.Encoder(tokenizer)

    def __call__(self, conversations: list, limit: int = 64, batch: int = 32) -> list[str]:
        """One answer (at most ``limit`` tokens) for each list of messages.

        An answer that did not end by itself carries a trailing marker, so that
        it counts as wrong in every comparison of whole answers.
        """
        prompts = [self.encoder.prompt(c) for c in conversations]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            for i, answer in zip(part, self.batch([prompts[i] for i in part], limit)):
                answers[i] = answer
        return answers

    @torch.inference_mode()
    def batch(self, prompts: list[list[int]], limit: int) -> list[str]:
        """Answers for prompts that are padded on the left to a common length."""
        pad, end = self.encoder.id[vocab.PAD], self.encoder.id[vocab.END]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=pad,
            use_cache=True,
        )
        return [self.decode(row[width:].tolist(), end) for row in out]

    def decode(self, ids: list[int], end: int) -> str:
        """Text up to the end token, or with the marker when there is none."""
        if end not in ids:
            return self.tokenizer.decode(ids) + " [cut]"
        return self.tokenizer.decode(ids[: ids.index(end)])


def contains(answer: str, word: str, any_case: bool = False) -> bool:
    """Whether the finished answer has ``word`` as a whole word."""
    if answer.endswith("[cut]"):
        return False
    if any_case:
        answer, word = answer.lower(), word.lower()
    for mark in ".,!?:;\"'{}()\n":
        answer, word = answer.replace(mark, " "), word.replace(mark, " ")
    return f" {' '.join(word.split())} " in f" {' '.join(answer.split())} "


def ratio(hits: list[bool]) -> dict:
    """Count, total and rate of a list of outcomes."""
    return {"right": sum(hits), "asked": len(hits), "rate": round(sum(hits) / max(1, len(hits)), 3)}


def recall(answer: Answerer, rng: random.Random, per_cell: int) -> dict:
    """Recall of each kind at each distance, ``per_cell`` conversations per combination."""
    cells = [(kind, d) for kind in text.KINDS for d in DISTANCES for _ in range(per_cell)]
    probes = [text.recall_probe(rng, kind, d) for kind, d in cells]
    answers = answer([messages for messages, _ in probes])
    hits = [contains(a, word) for a, (_, word) in zip(answers, probes)]

    def where(index: int, value) -> dict:
        """The outcomes of the cells having ``value`` at this position."""
        return ratio([h for h, cell in zip(hits, cells) if cell[index] == value])

    return {
        "all": ratio(hits),
        "kind": {k: where(0, k) for k in text.KINDS},
        "distance": {str(d): where(1, d) for d in DISTANCES},
        "cell": {
            k: {str(d): ratio([h for h, c in zip(hits, cells) if c == (k, d)])["right"] for d in DISTANCES}
            for k in text.KINDS
        },
        "per_cell": per_cell,
    }


def multi(answer: Answerer, rng: random.Random, count: int, corrected: bool) -> dict:
    """Three facts in one conversation, asked for one after the other.

    A conversation is ``whole`` when all three answers are right.
    """
    probes = [text.multi_probe(rng, i % 8, corrected) for i in range(count)]
    histories = [list(opening) for opening, _, _ in probes]
    rights: list[list[bool]] = [[] for _ in probes]
    for turn in range(3):
        for history, (_, questions, _) in zip(histories, probes):
            history.append(("user", questions[turn][1]))
        for i, reply in enumerate(answer(histories)):
            kind = probes[i][1][turn][0]
            rights[i].append(contains(reply, probes[i][2][kind]))
            histories[i].append(("assistant", reply.removesuffix(" [cut]")))
    return {**ratio([r for row in rights for r in row]), "whole": ratio([all(r) for r in rights])}


def called(answer: str) -> dict | None:
    """The name and the arguments of the answer's one tool call, read as vLLM's `hermes` parser does; None if it makes none."""
    if not answer.startswith(tool_talks.CALL):
        return None
    body = answer.removeprefix(tool_talks.CALL).removesuffix(" [cut]").removesuffix(tool_talks.CALL_END)
    try:
        return json.loads(body)
    except ValueError:
        return {}


def tools(answer: Answerer, rng: random.Random, count: int) -> dict:
    """Calls of tools whose names and values training never saw, answers made of their results, and turns that need no tool.

    One of 1 to 4 offered tools is right.  An answer is asked for after the right call, whatever the model called.
    """
    offers = [tool_talks.uses(rng, 1 + i % 4, held_out=True) for i in range(count)]
    asked = [rng.choice(offer) for offer in offers]
    openings = [
        [("system", tool_talks.offered(offer)), ("user", use.question)] for offer, use in zip(offers, asked)
    ]
    calls = [called(reply) or {} for reply in answer(openings, limit=96)]
    results = [
        [*opening, ("assistant", use.call), ("user", tool_talks.result_of(use.result))]
        for opening, use in zip(openings, asked)
    ]
    idle = answer([tool_talks.idle_probe(rng) for _ in range(count)])
    return {
        "called": ratio([bool(call) for call in calls]),
        "tool": ratio([call.get("name") == use.name for call, use in zip(calls, asked)]),
        "call": ratio(
            [call == {"name": use.name, "arguments": use.arguments} for call, use in zip(calls, asked)]
        ),
        "answer": ratio(
            [all(contains(a, part) for part in use.says) for a, use in zip(answer(results), asked)]
        ),
        "no_call": ratio([tool_talks.CALL not in reply for reply in idle]),
    }


def adapter(folder: pathlib.Path, name: str, rng: random.Random, count: int) -> dict:
    """Style of one adapter on open questions and recalls, and its recall."""
    model, tokenizer = load(folder / "model")
    network.load_lora(model, folder / "adapters" / name)
    answer = Answerer(model, tokenizer)
    open_answers = answer([[("user", q)] for q in OPEN_QUESTIONS], limit=120)
    cells = [(text.KINDS[i % 3], 1 + i % 10) for i in range(count)]
    probes = [text.recall_probe(rng, kind, d, name) for kind, d in cells]
    answers = answer([messages for messages, _ in probes], limit=120)
    return {
        "rank": styles.RANKS[name],
        "style": ratio([styles.follows(name, a) for a in open_answers + answers]),
        "recall": ratio(
            [contains(a, word, any_case=name == "shout") for a, (_, word) in zip(answers, probes)]
        ),
    }


def show(report: dict) -> None:
    """Print the report as short tables."""
    r = report["recall"]
    print(f"recall of held-out words, right of {r['per_cell']}, by turns since the fact")
    print("  kind    " + "".join(f"{d:>4}" for d in DISTANCES) + "    all")
    for kind in text.KINDS:
        cells = "".join(f"{r['cell'][kind][str(d)]:>4}" for d in DISTANCES)
        print(f"  {kind:<8}{cells}   {r['kind'][kind]['rate']:.0%}")
    print(f"  all kinds and distances: {r['all']['right']}/{r['all']['asked']}")
    for key, label in (("multi", "three facts"), ("corrected", "three facts, one corrected")):
        m = report[key]
        print(
            f"  {label}: {m['right']}/{m['asked']} answers, "
            f"{m['whole']['right']}/{m['whole']['asked']} conversations without a mistake"
        )
    t = report["tools"]
    print(
        "tools that training never saw: "
        + ", ".join(f"{key} {t[key]['right']}/{t[key]['asked']}" for key in t)
    )
    print("adapters")
    for name, a in report["adapters"].items():
        print(
            f"  {name:<8} rank {a['rank']:>3}   style {a['style']['right']}/{a['style']['asked']}"
            f"   recall {a['recall']['right']}/{a['recall']['asked']}"
        )
    print(f"took {report['seconds']} s", flush=True)


def run(folder: pathlib.Path, seed: int, per_cell: int = 12) -> dict:
    """Measure the model and all adapters found in ``folder``; prints tables, returns counts."""
    started = time.monotonic()
    rng = random.Random(f"check/{seed}")
    answer = Answerer(*load(folder / "model"))
    report = {
        "recall": recall(answer, rng, per_cell),
        "multi": multi(answer, rng, 24, corrected=False),
        "corrected": multi(answer, rng, 24, corrected=True),
        "tools": tools(answer, random.Random(f"tools/{seed}"), 10 * per_cell),
        "adapters": {
            name: adapter(folder, name, rng, 30)
            for name in styles.NAMES
            if (folder / "adapters" / name / "adapter_config.json").exists()
        },
    }
    report["seconds"] = round(time.monotonic() - started)
    show(report)
    return report
