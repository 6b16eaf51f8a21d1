"""Adapters of five ranks and the base model in one batch say, token for token, what each says alone.

Real engine, tiny random Llama, PEFT adapters (bench/live/mixed_batch.py). vLLM's own CPU wrapper fails this file: its base rows get the last
slot's adapter.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from bench.live.mixed_batch import BASE, PROMPT, SHAPE, Engine
from bench.live.models import model_folder, write_adapter
from engine_bridge.driver import lora

RANKS = (8, 16, 32, 64, 128)
NUM_SLOTS = 5
OTHER = list(range(200, 260))


ALL = list(SHAPE.linears)


@pytest.fixture(scope="module")
def without_adapters():
    """What an engine that knows nothing of adapters answers to PROMPT and to OTHER."""
    engine = Engine(model_folder(SHAPE))
    answers = [engine.run((prompt, BASE))[0] for prompt in (PROMPT, OTHER)]
    engine.close()
    return answers


@pytest.fixture(scope="module")
def engine(without_adapters):
    lora.install()
    engine = Engine(
        model_folder(SHAPE), enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=128, max_cpu_loras=6
    )
    engine.wrapper = lora.check_engine(engine.engine)
    yield engine
    engine.close()
    lora.uninstall()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """By rank, and "partial": one that touches q and v only. One more than fit into the host cache, two more than the slots."""
    from vllm.lora.request import LoRARequest

    root = tmp_path_factory.mktemp("adapters")
    requests = {}
    for number, rank in enumerate(RANKS, start=1):
        write_adapter(root / f"rank{rank}", SHAPE, rank, seed=rank, modules=ALL)
        requests[rank] = LoRARequest(f"rank{rank}", number, str(root / f"rank{rank}"))
    partial = ["self_attn.q_proj", "self_attn.v_proj"]
    for number, (name, modules) in enumerate((("partial", partial), ("seventh", ALL)), start=6):
        write_adapter(root / name, SHAPE, 32, seed=number, modules=modules)
        requests[name] = LoRARequest(name, number, str(root / name))
    return requests


@pytest.fixture(scope="module")
def alone(engine, adapters):
    """Each adapter's answer to PROMPT and OTHER, asked alone."""
    return {
        (name, which): engine.run((prompt, request))[0]
        for name, request in [("base", BASE), *adapters.items()]
        for which, prompt in (("PROMPT", PROMPT), ("OTHER", OTHER))
    }


def test_the_answers_alone_all_differ(alone):
    assert len({tuple(answer) for (_, which), answer in alone.items() if which == "PROMPT"}) == 8


def test_five_ranks_and_the_base_in_one_batch(engine, adapters, alone):
    mixed = engine.run((PROMPT, BASE), *((PROMPT, adapters[rank]) for rank in RANKS))
    assert mixed == [alone[name, "PROMPT"] for name in ("base", *RANKS)]


def test_the_base_in_a_mixed_batch_is_the_model_without_adapters(engine, adapters, without_adapters):
    first, *_, last = engine.run((PROMPT, BASE), *((PROMPT, adapters[rank]) for rank in RANKS), (OTHER, BASE))
    assert [first, last] == without_adapters


def test_two_requests_of_one_adapter_with_others_between(engine, adapters, alone):
    mixed = engine.run((PROMPT, adapters[64]), (PROMPT, BASE), (PROMPT, adapters[8]), (OTHER, adapters[64]))
    assert mixed == [alone[64, "PROMPT"], alone["base", "PROMPT"], alone[8, "PROMPT"], alone[64, "OTHER"]]


def test_prefills_that_join_decodes(engine, adapters, alone):
    order = [
        (16, "PROMPT"),
        ("base", "OTHER"),
        (128, "PROMPT"),
        (16, "OTHER"),
        ("base", "PROMPT"),
        (8, "OTHER"),
    ]
    prompts, answers, ids = {"PROMPT": PROMPT, "OTHER": OTHER}, {}, []
    for name, which in order:
        ids.append(engine.add(prompts[which], adapters.get(name)))
        for _ in range(3):
            engine.step(answers)
    while engine.engine.has_unfinished_requests():
        engine.step(answers)
    assert [answers[i] for i in ids] == [alone[key] for key in order]


def test_an_adapter_that_touches_q_and_v_only(engine, adapters, alone):
    mixed = engine.run((PROMPT, adapters["partial"]), (PROMPT, adapters[32]), (PROMPT, BASE))
    assert mixed == [alone[name, "PROMPT"] for name in ("partial", 32, "base")]


def test_more_adapters_than_slots(engine, adapters, alone):
    """All eight wait at once and take turns in the slots; then each once more, in the opposite order, through other slots."""
    assert len(adapters) > NUM_SLOTS
    for names in (["base", *adapters], ["base", *adapters][::-1]):
        mixed = engine.run(*((PROMPT, adapters.get(name)) for name in names))
        assert mixed == [alone[name, "PROMPT"] for name in names]


def test_an_adapter_removed_and_loaded_again(engine, adapters, alone):
    engine.run((PROMPT, adapters[8]), (PROMPT, adapters[128]))  # the tests before may have pushed them out
    for rank in (8, 128):
        assert engine.engine.remove_lora(adapters[rank].lora_int_id)
    mixed = engine.run((PROMPT, adapters[128]), (OTHER, adapters[8]), (PROMPT, BASE))
    assert mixed == [alone[128, "PROMPT"], alone[8, "OTHER"], alone["base", "PROMPT"]]
