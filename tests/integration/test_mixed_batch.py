"""Adapters of five ranks and the base model in one batch say, token for token, what each says alone.

Real engine, tiny random Llama, PEFT adapters. vLLM's own CPU wrapper fails this file: its base rows get the last
slot's adapter.
"""

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from bench.live.peers.engine import configure_environment, greedy
from bench.live.shared.models import ModelShape, model_folder, write_adapter
from engine_bridge.driver.corrections import cpu_steps, logits_rows
from engine_bridge.driver.in_process import runner_of
from engine_bridge.driver.lora import lora
from tests.adapter_corpus import make_adapter
from tests.merged import logprobs_of, merged_model

configure_environment()

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    max_model_len=512,
    dtype="bfloat16",  # as most models come
)
BASE = None
NUM_TOKENS = 12
PROMPT = list(range(5, 45))
RANKS = (8, 16, 32, 64, 128)
NUM_SLOTS = 5
OTHER = list(range(200, 260))
CHUNK = 128  # tokens of a step: prompts of more are computed in pieces

ALL = list(SHAPE.linears)


class Engine:
    """A vLLM engine that answers token lists greedily."""

    def __init__(self, model, **options) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            # vLLM's own bf16 arithmetic is not batch-invariant: 1 of 12 base-only answers of this model changed with its
            # companions, no adapter in sight. In fp32 a token changes only if rows are really mixed up.
            dtype="float32",
            enable_prefix_caching=False,  # a hit would skip the arithmetic that we compare
            seed=0,
            # Not by the environment: an engine of ours that ran in this process before may have taken the variable away.
            kv_cache_memory_bytes=1 << 30,
            **options,
        )
        self.engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self.count = 0

    def add(self, prompt, adapter=BASE, params=None):
        """Queue one request, greedy if nothing else is said; returns its id."""
        self.count += 1
        name, asked = str(self.count), {"prompt_token_ids": prompt}
        self.engine.add_request(name, asked, params or greedy(NUM_TOKENS), lora_request=adapter)
        return name

    def step(self, answers):
        """Take one step; its tokens go to `answers` by the ids of their requests."""
        for output in self.engine.step():
            answers.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

    def rest(self, answers, ids):
        """Step until all is answered; returns the tokens of these requests."""
        while self.engine.has_unfinished_requests():
            self.step(answers)
        return [answers[each] for each in ids]

    def run(self, *requests):
        """Answer `(prompt, adapter)` requests in one batch; returns one token list per request."""
        return self.rest({}, [self.add(*request) for request in requests])

    def close(self):
        """End the engine, so that the process can start another one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


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
        model_folder(SHAPE),
        enable_lora=True,
        max_loras=NUM_SLOTS,
        max_lora_rank=128,
        max_cpu_loras=6,
        max_num_batched_tokens=CHUNK,
    )
    logits_rows.watch(runner_of(engine.engine))
    cpu_steps.keep_seeds(runner_of(engine.engine))
    engine.wrapper = lora.check_runner(runner_of(engine.engine))
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


def test_the_base_in_a_mixed_batch_is_the_model_without_adapters(engine, adapters, without_adapters):
    first, *_, last = engine.run((PROMPT, BASE), *((PROMPT, adapters[rank]) for rank in RANKS), (OTHER, BASE))
    assert [first, last] == without_adapters


def test_prefills_that_join_decodes(engine, adapters, alone):
    order = [(16, "PROMPT"), ("base", "OTHER"), (128, "PROMPT")]
    order += [(16, "OTHER"), ("base", "PROMPT"), (8, "OTHER")]
    prompts, answers, ids = {"PROMPT": PROMPT, "OTHER": OTHER}, {}, []
    for name, which in order:
        ids.append(engine.add(prompts[which], adapters.get(name)))
        for _ in range(3):
            engine.step(answers)
    assert engine.rest(answers, ids) == [alone[key] for key in order]


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


# -- adapters on the output layer: every call for logits computes its own rows ------------------------------------------------


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Two adapters that change embedding and output layer, as requests; and by their names the model with each in its weights."""
    from vllm.lora.request import LoRARequest

    root = tmp_path_factory.mktemp("heads")
    hidden = SHAPE.hidden_size
    modules = {
        "model.embed_tokens": (SHAPE.vocab_size, hidden),
        "lm_head": (hidden, SHAPE.vocab_size),
        "model.layers.1.self_attn.q_proj": (hidden, hidden),
    }
    requests, merged = {"base": BASE}, {"base": merged_model(model_folder(SHAPE))}
    for number, (name, rank) in enumerate((("narrow", 8), ("wide", 32)), start=20):
        embeddings = frozenset({"model.embed_tokens"})
        folder = make_adapter(root / name, modules=modules, rank=rank, seed=rank, embeddings=embeddings)
        requests[name] = LoRARequest(name, number, str(folder))
        merged[name] = merged_model(model_folder(SHAPE), folder)
    return requests, merged


def prompt_logprobs(engine, *asked):
    """What each of (prompt, adapter, choices) is told of its prompt's tokens behind the first, in one batch."""
    from vllm import SamplingParams

    wish = {"max_tokens": 2, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
    ids = [engine.add(prompt, adapter, SamplingParams(n=num, **wish)) for prompt, adapter, num in asked]
    found = {}
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            found.setdefault(output.request_id, [None])
            if output.prompt_logprobs and len(output.prompt_logprobs) > 1:
                found[output.request_id] = output.prompt_logprobs
    return [
        [of_token[token].logprob for token, of_token in zip(prompt[1:], found[each][1:], strict=True)]
        for each, (prompt, _, _) in zip(ids, asked, strict=True)
    ]


def wanted(merged, prompt):
    """The same, from transformers."""
    logprobs = logprobs_of(merged, prompt)
    return [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("name", ["base", "narrow", "wide"])
def test_a_prompt_shorter_than_its_choices_is_told_its_own_log_probabilities(engine, heads, name):
    """One row of the prompt, six of samples: a plan of the samples would write behind the logits."""
    requests, merged = heads
    (found,) = prompt_logprobs(engine, ([34, 35], requests[name], 6))
    assert found == pytest.approx(wanted(merged[name], [34, 35]), abs=1e-3)


@pytest.mark.parametrize("first", range(3))
def test_log_probabilities_of_prompts_in_a_mixed_batch_are_each_adapters_own(engine, heads, first):
    requests, merged = heads
    order = ("base", "narrow", "wide", "base", "narrow")[first : first + 3]
    prompts = {"base": PROMPT, "narrow": [7, 8, 9], "wide": OTHER}
    found = prompt_logprobs(engine, *((prompts[name], requests[name], 2) for name in order))
    for name, own in zip(order, found, strict=True):
        assert own == pytest.approx(wanted(merged[name], prompts[name]), abs=1e-3)


def test_prompts_computed_in_pieces_beside_others_are_told_their_own_log_probabilities(engine, heads):
    requests, merged = heads
    long = [(7 * at) % SHAPE.vocab_size for at in range(2 * CHUNK + 9)]
    asked = [("wide", long), ("base", PROMPT), ("narrow", long[5:]), ("base", long[9:])]
    found = prompt_logprobs(engine, *((prompt, requests[name], 1) for name, prompt in asked))
    for (name, prompt), own in zip(asked, found, strict=True):
        assert own == pytest.approx(wanted(merged[name], prompt), abs=1e-3)


def test_answers_with_adapters_on_embedding_and_output_layer_are_those_of_merged_weights(engine, heads):
    requests, merged = heads
    found = engine.run(*((PROMPT, requests[name]) for name in requests))
    for name, answer in zip(requests, found, strict=True):
        logprobs = logprobs_of(merged[name], [*PROMPT, *answer])
        assert logprobs[len(PROMPT) - 1 : -1].argmax(-1).tolist() == answer


def test_an_answer_with_a_seed_is_the_same_however_its_prompt_is_computed(engine):
    """Three steps compute the long prompt, and the first two each throw a token away; beside another answer there are other parts."""
    prompt = [(7 * at) % SHAPE.vocab_size for at in range(2 * CHUNK + 9)]
    long, short = (drawn(engine, prompt[:size]) for size in (len(prompt), CHUNK - 9))
    assert long == drawn(engine, prompt, beside=OTHER)
    assert short == drawn(engine, prompt[: CHUNK - 9], beside=prompt)
    assert len({tuple(long), tuple(short)}) == 2


def drawn(engine, prompt, beside=None):
    """Twelve tokens drawn with a seed."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, temperature=1, seed=7, ignore_eos=True, detokenize=False)
    if beside is not None:
        engine.add(beside)
    return engine.rest({}, [engine.add(prompt, params=params)])[0]
