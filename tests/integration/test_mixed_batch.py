"""Adapters of five ranks and the base model in one batch say, token for token, what each says alone.

Real engine, tiny random Llama, PEFT adapters written here. vLLM's own CPU wrapper fails this file: its base rows get the last
slot's adapter.
"""

import json
import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from engine_bridge.driver import lora  # noqa: E402  (after the skips)

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 512, 4, 4, 2, 320
WIDTHS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, HIDDEN // 2),
    "v_proj": (HIDDEN, HIDDEN // 2),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}
RANKS = (8, 16, 32, 64, 128)
BASE = None
NUM_SLOTS = 5
NUM_TOKENS = 24


def write_model(path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def write_adapter(path, rank, seed, targets=tuple(WIDTHS)):
    """A PEFT adapter of random weights, strong enough to change what the model says."""
    from safetensors.torch import save_file

    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for target in targets:
            part = "self_attn" if target[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            num_in, num_out = WIDTHS[target]
            for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"{name}.lora_{side}.weight"] = (
                    torch.randn(shape, generator=generator) * 0.05
                ).bfloat16()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    (path / "adapter_config.json").write_text(
        json.dumps({**config, "bias": "none", "use_dora": False, "use_rslora": False})
    )


class Engine:
    """A vLLM engine that answers token lists greedily."""

    def __init__(self, model, **options):
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
            **options,
        )
        self.engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self.count = 0

    def add(self, prompt, adapter=BASE, num_tokens=NUM_TOKENS):
        from vllm import SamplingParams

        self.count += 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params, lora_request=adapter)
        return str(self.count)

    def step(self, answers):
        for output in self.engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)

    def run(self, *requests):
        """Answer `(prompt, adapter)` requests in one batch; returns one token list per request."""
        ids, answers = [self.add(*request) for request in requests], {}
        while self.engine.has_unfinished_requests():
            self.step(answers)
        return [answers[i] for i in ids]

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


PROMPT = list(range(5, 45))
OTHER = list(range(200, 260))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="module")
def without_adapters(model):
    """What an engine that knows nothing of adapters answers to PROMPT and to OTHER."""
    engine = Engine(model)
    answers = [engine.run((prompt, BASE))[0] for prompt in (PROMPT, OTHER)]
    engine.close()
    return answers


@pytest.fixture(scope="module")
def engine(model, without_adapters):
    lora.install()
    engine = Engine(model, enable_lora=True, max_loras=NUM_SLOTS, max_lora_rank=128, max_cpu_loras=6)
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
        write_adapter(root / f"rank{rank}", rank, seed=rank)
        requests[rank] = LoRARequest(f"rank{rank}", number, str(root / f"rank{rank}"))
    for number, (name, targets) in enumerate(
        (("partial", ("q_proj", "v_proj")), ("seventh", tuple(WIDTHS))), start=6
    ):
        write_adapter(root / name, 32, seed=number, targets=targets)
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
