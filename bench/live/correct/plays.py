"""What is asked of a server so that its answers depend on what it has kept: each play notes checked answers.

Every play is of one kind of reuse. An answer is right when the oracle would have written each of its tokens; `may_reuse` says whether KV from
before may stand in its prompt, `must_reuse` that some has to, or the play did not come to what it is about.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.live.correct.asking import (
    BASE,
    DEVICE_TOKENS,
    GREEDY,
    LONG_TOKENS,
    Answer,
    Asker,
    Serve,
    in_a_process,
    prompt_of,
    serving,
)
from bench.live.correct.checkpoints import adapter_folders_of, flags_of, folder_of, write_adapter
from bench.live.correct.families import DRAFTS_BY_LOOKUP, MAX_MODEL_LEN, Family
from bench.live.correct.oracle import Oracle, StockOracle
from bench.live.correct.pictures import SIGHTS, as_part, picture

LOGPROB_TOLERANCE = 0.02
NUM_TRIES = 4
TWO_RANKS = "--tensor-parallel-size=2"
PIECES = "--max-num-batched-tokens=256"
OPENING = "You keep the harbour's books and weigh each word. " * 4
"""With which conversations begin. It stands in the first message: what is computed ahead for a session of the API knows no system prompt."""


class NotComputable(Exception):
    """vLLM lacks an operation here, whose name is the argument, so that it computes nothing of this model."""


class Checked(Struct, frozen=True):
    """One case.

    num_wrong: tokens (or log probabilities) that are not the oracle's; is_stale: KV was used that must not be; problem: why the case
    says nothing, "" if it does; num_prompt: tokens of the prompt.
    """

    play: str
    case: str
    num_tokens: int
    num_wrong: int
    num_cached: int
    is_stale: bool = False
    problem: str = ""
    num_prompt: int = 0


Note = Callable[[Checked], None]
"""Is told of each case."""


class Judge:
    """Checks answers of one model. adapters: the folders by the names that the server has for them."""

    def __init__(
        self,
        play: str,
        oracle: Oracle | StockOracle,
        adapters: dict[str, Path],
        note: Note,
        reuses_kv: bool = True,
    ) -> None:
        self.play, self.oracle, self.adapters, self.note = play, oracle, adapters, note
        self._reuses_kv = reuses_kv

    def num_wrong(self, answer: Answer) -> int:
        """Return the number of tokens of an answer that are not the oracle's."""
        adapter = self.adapters.get(answer.adapter)
        return self.oracle.num_wrong(answer.prompt, answer.tokens, adapter, answer.pictures)

    def check(self, case: str, answer: Answer, *, may_reuse: bool = True, must_reuse: bool = False) -> None:
        """Compare an answer with the oracle's, and note the case.

        may_reuse: whether KV from before may be part of its prompt. must_reuse: whether some has to be reused for the case to say anything.
        """
        is_stale = answer.num_cached > 0 and not (may_reuse and self._reuses_kv)
        is_missing = must_reuse and self._reuses_kv and answer.num_cached == 0
        problem = "nothing was reused" if is_missing else ""
        num_wrong = self.num_wrong(answer)
        self.note(
            Checked(
                self.play,
                case,
                len(answer.tokens),
                num_wrong,
                answer.num_cached,
                is_stale,
                problem,
                len(answer.prompt),
            )
        )


def named(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders by the names under which the server has them."""
    return {f"adapter{number}": folder for number, folder in enumerate(folders)}


# -- one family ----------------------------------------------------------------------------------------------------------------------


async def family_play(
    family: Family,
    scratch: Path,
    note: Note,
    *,
    has_peer: bool = True,
    flags: Sequence[str] = (),
    serve: Serve = in_a_process,
) -> dict[str, str]:
    """Every tier, adapters, sessions, batches, a restart, and a second node, with one model. Returns what its server goes without, and why.

    has_peer: whether there is a second node. flags: of the server, beside the family's own. serve: how it is served. Raises NotComputable: vLLM has
    no kernel of the model for this processor.
    """
    if not family.is_computable():
        raise NotComputable(family.operation)
    adapters = named(adapter_folders_of(family))
    folder = folder_of(family)
    judge = Judge(family.name, _oracle_of(family, folder), adapters, note, family.reuses_kv)
    data = scratch / family.name
    start: dict[str, Any] = {"adapters": adapters, "kv_token_bytes": family.kv_token_bytes}
    start |= {"dtype": family.dtype, "serve": serve}
    flags = [*flags_of(family), *flags]
    adapter = next(iter(adapters), "")
    async with serving(folder_of(family), data, *flags, **start) as server:
        [node] = (await server.call("GET", "/v1/nodes"))["nodes"]
        await _tiers(judge, server, adapter)
        await _mixed_batch(judge, server, [*adapters])
        await _prompt_logprobs(judge, server, adapter)
        spoken = await _conversations(judge, server, adapter) if family.has_chat else []
        shown = await _pictures(judge, server, adapter) if family.sight else []
    async with serving(folder_of(family), data, *flags, **start) as server:
        # What was asked once lies on the device afterwards and says nothing about the disk: each is asked once. What is announced is read from disk
        # also where computing it is predicted to be faster.
        for name, seeds in {adapter: (1, 4), "": (1, 0, 3)}.items():
            asked = (await server.complete(prompt_of(seed), name) for seed in seeds)
            ways = [asked, *([_announced(server, spoken, "first", name)] if spoken else [])]
            await _until_reused(judge, f"from disk after a restart {name}", *ways)
        if spoken:
            before = ((FIRST_TURN, ""), (OTHER_TURN, adapter), (OTHER_TURN, ""))
            told = (await server.chat(*turn) for turn in before)
            announced = _announced(server, spoken, "first")
            await _until_reused(judge, "a conversation after a restart", told, announced)
        if shown:
            seen = (await server.chat(_about(picture(seed), more=LONGER)) for seed in (0, 2, 1))
            announced = _announced(server, shown, "pictures")
            await _until_reused(judge, "a picture, from disk after a restart", seen, announced)
    if family.has_chat and has_peer:
        start["device_tokens"] = 3 * DEVICE_TOKENS  # both share it
        async with serving(folder, scratch / "two nodes", "--nodes=2", *flags, **start) as server:
            await _until_reused(judge, "from another node", _moved(server))
    return {each["mechanism"]: each["why"] for each in node["left_out"]}


def _oracle_of(family: Family, folder: Path) -> Oracle | StockOracle:
    if not family.has_own_rounding:
        return Oracle(folder, family.computed_as)
    return StockOracle(
        folder,
        family.dtype,
        MAX_MODEL_LEN,
        has_adapters=bool(adapter_folders_of(family)),
        sight=SIGHTS.get(family.sight),
        kv_cache_dtype=family.kv_cache_dtype or "auto",
    )


async def _tiers(judge: Judge, server: Asker, adapter: str) -> None:
    judge.check("cold", await server.complete(prompt_of(1)), may_reuse=False)
    on_device = await server.complete(prompt_of(1))
    judge.check("from the device", on_device, must_reuse=True)
    if adapter:
        judge.check("adapter, cold", await server.complete(prompt_of(1), adapter), may_reuse=False)
        judge.check("adapter, from the device", await server.complete(prompt_of(1), adapter), must_reuse=True)
    judge.check("of one token", await server.complete(prompt_of(4, 1)), may_reuse=False)
    shared = [*prompt_of(1)[:320], *prompt_of(2, 200)]
    judge.check("another end, from the device", await server.complete(shared))
    judge.check("another tenant", await server.complete(prompt_of(1), cache_salt="other"), may_reuse=False)
    for name in dict.fromkeys(("", adapter)):
        case = f"from host memory {name}"
        later = _later(server, partial(server.complete, prompt_of(1), name))
        await _until_reused(judge, case, later, enough=max(on_device.num_cached, 1))
    await server.fill_device()
    shared = [*prompt_of(1)[:352], *prompt_of(3, 100)]
    judge.check("another end, from host memory", await server.complete(shared))


async def _until_reused(judge: Judge, case: str, *ways: AsyncIterable[Answer], enough: int = 1) -> None:
    """Check answers, asked in one way after the other, until one has reused `enough` tokens' KV; if none has reused any, the last one says nothing.

    The server may predict that computing a prompt again, or a part of it, takes less time than a copy, and be right.
    """
    last, most = None, 0
    for answers in ways:
        async for answer in answers:
            if last is not None:
                judge.check(case, last)
            last, most = answer, max(most, answer.num_cached)
            if answer.num_cached >= enough:
                judge.check(case, answer, must_reuse=True)
                return
    assert last is not None
    judge.check(case, last, must_reuse=most == 0)


async def _later(server: Asker, ask: Callable[[], Awaitable[Answer]]) -> AsyncIterator[Answer]:
    """Ask the same several times, each time after the device's blocks have been taken by others."""
    for _ in range(NUM_TRIES):
        await server.fill_device()
        yield await ask()


async def _mixed_batch(judge: Judge, server: Asker, adapters: Sequence[str]) -> None:
    """Requests of several adapters and of none in the same steps, of which some find KV and some do not."""
    asked = [
        server.complete(prompt_of(number % 5, 200 + 40 * number), adapter)
        for number, adapter in enumerate(["", *adapters, "", *adapters][:6], start=10)
    ]
    for number, answer in enumerate(await asyncio.gather(*asked)):
        judge.check(f"together with others, {number}", answer)


async def _prompt_logprobs(judge: Judge, server: Asker, adapter: str, num_tokens: int = 70) -> None:
    """Log probabilities of prompts, of an adapter and of none in the same steps, with several answers each."""
    prompt = prompt_of(20, num_tokens)
    names = ("", adapter, "")
    wanted = {"prompt": prompt, "prompt_logprobs": 0, "n": 2, "max_tokens": 3, "temperature": 1}
    asked = [server.call("POST", "/v1/completions", wanted | {"model": name or BASE}) for name in names]
    for number, (name, reply) in enumerate(zip(names, await asyncio.gather(*asked), strict=True)):
        expected = judge.oracle.logprobs(prompt, judge.adapters.get(name))
        told = reply["choices"][0]["prompt_logprobs"]
        found = [told[at][str(token)]["logprob"] for at, token in enumerate(prompt) if at]
        num_wrong = sum(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(expected, found, strict=True))
        case = f"log probabilities of a prompt, {number} {name}"
        judge.note(Checked(judge.play, case, len(found), num_wrong, 0))


def turn(text: str) -> list[Mapping[str, Any]]:
    """Return the first message of a conversation."""
    return [{"role": "user", "content": OPENING + text}]


FIRST_TURN, OTHER_TURN = turn("Tell me what came in today, ship by ship. " * 3), turn("And you?")
"""How the two conversations begin."""


def gone_on(messages: Sequence[Mapping[str, Any]], answer: Answer) -> list[Mapping[str, Any]]:
    """Return a conversation with its answer and another question."""
    more = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Go on."}]
    return [*messages, *more]


async def _announced(
    server: Asker, messages: Sequence[Mapping[str, Any]], session: str, adapter: str = ""
) -> AsyncIterator[Answer]:
    """Announce and ask a session's turn; several times, where others take the device's blocks before each further one."""
    for _ in range(NUM_TRIES):
        await server.announce(session, adapter)
        yield await server.chat(messages, adapter, session=session)
        await server.fill_device()


async def _moved(server: Asker) -> AsyncIterator[Answer]:
    """Begin a conversation on one node, and ask its next turn of the other one; several times."""
    names = await server.ready_nodes(2)
    for number in range(NUM_TRIES):
        session = f"moved-{number}"
        messages = [{"role": "user", "content": f"{number}. {FIRST_TURN[0]['content']}"}]
        await _leave_alone(server, names[0], names[1])
        first = await server.chat(messages, session=session)
        await _leave_alone(server, names[1], names[0])
        yield await server.chat(gone_on(messages, first), session=session)


async def _leave_alone(server: Asker, name: str, other: str) -> None:
    """Give work to one node only."""
    await server.call("POST", f"/v1/nodes/{name}/reopen")
    await server.call("POST", f"/v1/nodes/{other}/drain", {"force": True})


async def _conversations(judge: Judge, server: Asker, adapter: str) -> list[Mapping[str, Any]]:
    """A turn under the base model, its history computed ahead under an adapter, a turn under that; then another conversation that begins alike.

    Returns the messages of the last turn of the session "first".
    """
    first = await server.chat(FIRST_TURN, session="first")
    judge.check("first turn", first)
    messages = gone_on(FIRST_TURN, first)
    for name in dict.fromkeys((adapter, "")):
        announced = _announced(server, messages, "first", name)
        await _until_reused(judge, f"turn that was announced {name}", announced)
        await server.fill_device()
    for name in dict.fromkeys((adapter, "")):
        answer = await server.chat(OTHER_TURN, name, session=f"second-{name}")
        judge.check(f"another conversation that begins alike {name}", answer)
        judge.check(f"the same, once more {name}", await server.chat(OTHER_TURN, name))
    return messages


LOOK = "Look at this closely, and say what you see. "
# Behind a picture that is to be found again: recurrent layers keep a state only every few hundred tokens.
LONGER = LOOK * 8


def _about(*pngs: bytes, more: str = "") -> list[dict[str, Any]]:
    """A question about pictures, between texts so long that some blocks lie before, some inside and some behind the pictures."""
    text = LOOK * 2
    parts = [part for png in pngs for part in ({"type": "text", "text": text}, as_part(png))]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text + more}]}]


async def _pictures(judge: Judge, server: Asker, adapter: str) -> list[dict[str, Any]]:
    """Pictures whose tokens are the same and whose content is not, alone, together, in a conversation, and under an adapter, in all tiers.

    Returns the messages of the last turn of the session "pictures".
    """
    first, second, wide = picture(0), picture(1), picture(2, width=168)
    judge.check("a picture, cold", await server.chat(_about(first, more=LONGER)), may_reuse=False)
    judge.check("a picture, from the device", await server.chat(_about(first, more=LONGER)), must_reuse=True)
    # Its text before the picture may be reused.
    judge.check("another picture of the same size", await server.chat(_about(second, more=LONGER)))
    judge.check("a picture of another size", await server.chat(_about(wide)))
    judge.check("two pictures", await server.chat(_about(first, second)))
    judge.check("the same two the other way round", await server.chat(_about(second, first)))
    judge.check(
        "a picture, another tenant", await server.chat(_about(first), cache_salt="x"), may_reuse=False
    )
    asked = [
        server.chat(_about(each, more="Now."), name) for each in (first, second) for name in ("", adapter)
    ]
    for number, answer in enumerate(await asyncio.gather(*asked)):
        judge.check(f"pictures together, {number}", answer)
    later = _later(server, partial(server.chat, _about(second, more=LONGER)))
    await _until_reused(judge, "a picture, from host memory", later)
    messages = _about(first)
    for turn in range(2):
        said = await server.chat(messages, session="pictures")
        judge.check(f"a conversation about a picture, turn {turn}", said)
        messages += [{"role": "assistant", "content": said.text}, *_about(second, more="And this?")]
    announced = _announced(server, messages, "pictures")
    await _until_reused(judge, "a picture's conversation that was announced", announced)
    return messages


# -- what changes between two starts -------------------------------------------------------------------------------------------------


async def changes_play(family: Family, scratch: Path, note: Note) -> None:
    """One data folder, and at each start something else that KV depends on; at the end something that it does not depend on."""
    model, data = scratch / "model", scratch / "changes"
    shutil.copytree(folder_of(family), model)
    prompt, play = prompt_of(30), f"{family.name}, changed"

    async def ask(case: str, oracle: Oracle, *flags: str, reuse: bool) -> None:
        """Ask a server that was started anew, and check the answer."""
        judge = Judge(play, oracle, {}, note)
        async with serving(model, data, *flags) as server:
            answer = await server.complete(prompt)
            judge.check(case, answer, may_reuse=reuse, must_reuse=reuse)

    first = Oracle(model)
    await ask("first start", first, reuse=False)
    await ask("another number of sequences", first, "--max-num-seqs=5", reuse=True)
    ropes = {"rope_type": "default", "rope_theta": 500.0}
    overrides = f"--engine-arg=hf_overrides={json.dumps({'rope_parameters': ropes})}"
    await ask("another RoPE", Oracle(model, {"rope_parameters": ropes}), overrides, reuse=False)
    await ask("split over two ranks", first, TWO_RANKS, reuse=False)
    _change_middle(model / "model.safetensors")
    await ask("weights changed in the file's middle", Oracle(model), reuse=False)


def _change_middle(path: Path) -> None:
    """Change the weights of a file that its first and last MiB do not have, as a merged adapter may; the file's times stay."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = json.loads(data[8:begin])
    changed = 0
    for name, described in tensors.items():
        if "down_proj" in name:
            start, end = (begin + offset for offset in described["data_offsets"])
            if start >= 1 << 20 and end <= len(data) - (1 << 20):
                for at in range(start + 3, end, 4):
                    data[at] ^= 0x80  # the sign of a float32
                changed += 1
    assert changed, "no tensor lies in the file's middle"
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# -- adapters ------------------------------------------------------------------------------------------------------------------------


async def adapters_play(family: Family, scratch: Path, note: Note) -> None:
    """Ask more adapters than there is room for, each twice: the weights that idle KV memory keeps of an adapter must be its own."""
    folders = adapter_folders_of(family)
    adapters = named(folders)
    judge = Judge(f"{family.name}, many adapters", Oracle(folder_of(family)), adapters, note)
    adapter_gib = folders[0].joinpath("adapter_model.safetensors").stat().st_size / (1 << 30)
    flags = ("--kv-host-gib=0", "--max-loras=1", f"--adapter-host-gib={2.5 * adapter_gib:.6f}", *family.flags)
    start: dict[str, Any] = {"adapters": adapters, "device_tokens": 20_000}
    async with serving(folder_of(family), scratch / "many", *flags, **start) as server:
        for turn in ("first", "second"):
            for name in adapters:
                answer = await server.complete(prompt_of(40, 90), name, cache_salt=turn)
                judge.check(f"{name}, asked for the {turn} time", answer)


async def head_play(family: Family, scratch: Path, note: Note) -> None:
    """An adapter of the output head beside one of attention and the base model, with log probabilities of prompts and several answers.

    Then once more with prompts that take several steps and answers of which most tokens are drafted.
    """
    folder = scratch / "head-adapter"
    write_adapter(family, folder, 77, adapted=["lm_head", "q_proj"])
    adapters = {"head": folder, "plain": adapter_folders_of(family)[0]}
    oracle, play = Oracle(folder_of(family)), f"{family.name}, adapter of the head"
    for kind, flags in {play: (), f"{play}, drafts": (PIECES, DRAFTS_BY_LOOKUP)}.items():
        judge = Judge(kind, oracle, adapters, note)
        async with serving(folder_of(family), scratch / "head", *flags, adapters=adapters) as server:
            await _head(judge, server)


async def _head(judge: Judge, server: Asker) -> None:
    for name in ("head", "plain", ""):
        answer = await server.complete(prompt_of(50, 90), name)
        judge.check(f"answer of {name or 'the base model'}", answer)
    wanted = {"prompt": [34, 35], "n": 6, "temperature": 1, "prompt_logprobs": 0, "max_tokens": 1}
    body = {"model": "head"} | wanted
    await asyncio.gather(*(server.call("POST", "/v1/completions", body) for _ in range(4)))
    for name, num_tokens in (("head", 70), ("plain", 70), ("head", LONG_TOKENS)):
        await _prompt_logprobs(judge, server, name, num_tokens)
    names = ["head", "", "plain", "head", ""]
    asked = [server.complete(prompt_of(60 + n, 40 + n), name) for n, name in enumerate(names)]
    for number, answer in enumerate(await asyncio.gather(*asked)):
        judge.check(f"together, {number}", answer)


async def replaced_play(family: Family, scratch: Path, note: Note) -> None:
    """An adapter that is replaced in its folder while the server runs: no KV and no weights of the old one are used for the new one."""
    old, new = adapter_folders_of(family)[:2]
    parent = scratch / "adapters"
    shutil.copytree(old, parent / "changing")
    oracle = Oracle(folder_of(family))
    play = f"{family.name}, replaced adapter"
    async with serving(folder_of(family), scratch / "replaced", f"--adapters-dir={parent}") as server:
        before = Judge(play, oracle, {"changing": old}, note)
        before.check("old version", await server.complete(prompt_of(70), "changing"), may_reuse=False)
        shutil.copytree(new, scratch / "incoming")
        (parent / "changing").rename(scratch / "outgoing")
        (scratch / "incoming").rename(parent / "changing")
        after = Judge(play, oracle, {"changing": new}, note)
        answer = await _until_changed(server, before)
        after.check("new version", answer, may_reuse=False)
        after.check("new version, again", await server.complete(prompt_of(70), "changing"), must_reuse=True)


async def _until_changed(server: Asker, before: Judge) -> Answer:
    """The first answer of the new version; while the old one is served, its answers are the old one's."""
    for _ in range(100):
        answer = await server.complete(prompt_of(70), "changing")
        if answer.num_cached == 0 or before.num_wrong(answer):
            return answer
        await asyncio.sleep(0.1)
    return answer


# -- detokenising --------------------------------------------------------------------------------------------------------------------


async def characters_play(family: Family, scratch: Path, note: Note) -> None:
    """Ask prompts that end inside a character: the answer is the generated text, whatever bytes the prompt ends with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_of(family))
    async with serving(folder_of(family), scratch / "characters") as server:
        for number, text in enumerate(("naïve €", "日本", "🙂🙂", "e\u0301")):
            whole = tokenizer.encode("Say it: " + text, add_special_tokens=False)
            for cut in (1, 2):
                prompt = whole[:-cut]
                body = GREEDY | {"model": BASE, "prompt": prompt}
                choice = (await server.call("POST", "/v1/completions", body))["choices"][0]
                is_echoed = choice["text"].startswith(tokenizer.decode(prompt)[:6])
                case = f"a prompt that lacks {cut} bytes of its last character, {number}"
                note(Checked(f"{family.name}, characters", case, 1, int(is_echoed), 0))
