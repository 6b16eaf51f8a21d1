from typing import Any

import pytest

from engine_bridge.policy.limits.model_support import (
    CONSEQUENCES,
    CannotHave,
    Mechanism,
    ModelFacts,
    left_out,
)
from engine_bridge.policy.limits.refusals import is_final, refusal, refusal_of


@pytest.mark.parametrize(
    ("facts", "lacks"),
    [
        ({}, []),
        ({"takes_adapters": False}, ["adapters"]),
        ({"is_recurrent": True}, []),
        ({"is_speculative": True}, []),
        ({"splits_by_expert": False}, ["expert parallelism"]),
        ({"is_recurrent": True, "is_speculative": True}, ["KV tiers"]),
        ({"is_recurrent": True, "is_speculative": True, "undoes_drafts": False}, ["drafts"]),
        ({"reuses_kv": False, "is_recurrent": True}, ["KV tiers"]),
        ({"takes_adapters": False, "reuses_kv": False}, ["adapters", "KV tiers"]),
    ],
)
def test_what_a_model_cannot_have_follows_from_its_facts(
    facts: dict[str, bool], lacks: list[Mechanism]
) -> None:
    found = left_out(ModelFacts(architecture="OddForCausalLM", **facts))
    assert list(found) == lacks and found.keys() <= CONSEQUENCES.keys()
    assert "OddForCausalLM" in found.get("adapters", "OddForCausalLM")


@pytest.mark.parametrize(
    ("facts", "says", "helps"),
    [
        ({"missing_operation": "odd_scan"}, "lacks the operation odd_scan", "--device"),
        ({"generates": False}, "generates no text", "--embedding-model"),
        ({"has_encoder": True}, "by an encoder", "that generates text"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_what_to_do(
    facts: dict[str, Any], says: str, helps: str
) -> None:
    assert refusal(ModelFacts(architecture="OddForCausalLM")) is None
    refused = refusal(ModelFacts(architecture="OddForCausalLM", **facts))
    assert refused is not None
    assert says in refused.why and "OddForCausalLM" in refused.why and helps in refused.remedy


@pytest.mark.parametrize(
    ("error", "says", "helps", "stays"),
    [
        ("'_OpNamespace' '_C' object has no attribute 'odd_scan'", "odd_scan", "--device", False),
        ("is_odd=False is supported only for CUDA and ROCm for now", "is_odd=False", "--device", False),
        ("_C::odd_quant() expected at most 0 argument(s) but received 4", "odd_quant", "--device", False),
        (
            "Failed to find a kernel that can implement the ScaledMM linear layer. Reasons: \n many",
            "quantised weights: the ScaledMM linear layer",
            "--device",
            True,
        ),
        (
            "No Int8 MoE backend supports the deployment configuration (a=1). Set `ODD=DEBUG`",
            "quantised experts: No Int8 MoE backend",
            "--device",
            False,
        ),
        ("Unsupported CPU attention configuration: head_dim=40 isa=1", "head_dim=40", "--device", True),
        (
            "ValidationError: 1 validation error for SchedulerConfig\n  Value error, odd_tokens (2) must be more [type=value_error, in",
            "odd_tokens (2) must be more",
            "Change the setting",
            True,
        ),
        (
            "ValidationError: 1 validation error for VllmConfig\n  Value error, torch.float32 is not supported for quantization method fp8. "
            "Supported dtypes: [torch.bfloat16, torch.float16] [type=value_error, input_value=...]",
            "Supported dtypes: [torch.bfloat16, torch.float16]",
            "--dtype",
            True,
        ),
        (
            "TypeError: CPUAttentionBackendImpl.__init__() got an unexpected keyword argument 'odd_window'",
            "asks of it: odd_window",
            "--device",
            True,
        ),
        ("ValueError: Unsupported ODD8 MoE backend: NONE", "experts: Unsupported ODD8", "--device", False),
        (
            "ValueError: odd_alibi is not supported by backend CPU_ATTN.",
            "odd_alibi is not supported by backend CPU_ATTN",
            "--device",
            False,
        ),
        (
            "ValueError: Aligned KV cache block size 128 is not supported by attention backend(s): CPU_MLA.",
            "block size 128",
            "--device",
            False,
        ),
        (
            "NotImplementedError: OddForCausalLM (Odd) requires the V2 model runner for its embedding state; it is",
            "OddForCausalLM (Odd) requires the V2 model runner",
            "--device",
            False,
        ),
        (
            "NotImplementedError: Odd Attention is not supported on CPU.",
            "Odd Attention is not",
            "--device",
            False,
        ),
        ("NotImplementedError: Odd (MTP) is not implemented on CPU.", "Odd (MTP) is not", "--device", False),
        (
            "ImportError: `odd` is not installed. Please install it with `pip install even[odd]`",
            "lacks a package: `odd` is not installed",
            "opencv-python-headless",
            True,
        ),
        (
            "ImportError: \nOddModel requires the odd library but it was not found in your environment. You can",
            "lacks a package: OddModel requires the odd library",
            "Install it",
            True,
        ),
        ("ModuleNotFoundError: No module named 'odd'", "No module named 'odd'", "Install it", True),
        ("ModuleNotFoundError: No module named 'tilelang'", "'tilelang'", "no CPU can run it", False),
        (
            "ImportError: FlashInfer is required for the flashinfer Mamba SSU backend. Please install flashinfer (>= 0.6.4)",
            "kernels for GPUs",
            "--device",
            False,
        ),
        ("module 'triton' has no attribute 'set_allocator'", "triton.set_allocator", "--device", False),
        (
            "Layer 0 does not dispatch through the Transformers attention interface and vLLM has no other way",
            "no class for this model",
            "another model",
            True,
        ),
        ("There is no module or parameter named 'a.b' in Odd. The", "Odd, which has no a.b", "again", True),
        ("Following weights were not initialized from checkpoint: {'a.b'}", "a.b", "again", True),
        ("Error while deserializing header: incomplete metadata", "incomplete", "again", True),
        ("Attempted to load weight (torch.Size([4])) into parameter", "torch.Size([4])", "again", True),
        (
            "Validation error for field 'num_hidden_layers':\n    expected int",
            "num_hidden_layers",
            "again",
            True,
        ),
        ("'OddConfig' object has no attribute 'rotary_dim'", "lacks rotary_dim", "again", True),
        (
            "1 validation error for VllmConfig\n  Value error, --odd can only be set with --even [type=value_error]",
            "--odd can only be set with --even",
            "--device",
            False,
        ),
        (
            "1 validation error for VllmConfig\n  Value error, Odd quantisation is no longer supported. Use another. [type=value_error]",
            "serve this model: Odd quantisation is no longer supported",
            "another model",
            True,
        ),
        (
            "ValueError: The repository /odd contains custom code which must be executed to correctly load the model.",
            "brings code of its own",
            "--trust-remote-code",
            True,
        ),
        ("Unknown RoPE scaling type odd", "type odd", "another model", True),
        ("KeyError: Missing required keys in `rope_parameters`: 'odd'", "'odd'", "another model", True),
        (
            "Marlin does not support weight_bits = odd. Only types = [] are supported",
            "quantised weights: Marlin does not support weight_bits = odd",
            "--device",
            True,
        ),
        (
            "AssertionError: All drafting layers should belong to one group",
            "to one group",
            "--speculative-config",
            True,
        ),
        (
            "AssertionError: assert all(output_size % self.tp_size == 0 for output_size in sizes) (linear.py:718)",
            "over so many devices: assert all(",
            "--tensor-parallel-size",
            True,
        ),
        (
            "AssertionError: 255 is not divisible by 2",
            "255 is not divisible by 2",
            "--tensor-parallel-size",
            True,
        ),
        ("Unsupported speculative method: 'mtp'", "'mtp' with this model", "--speculative-config", True),
        (
            "ValueError: `max_new_tokens` must be greater than 0, but is 0.",
            "generation_config.json is wrong: `max_new_tokens` must be greater than 0",
            "take it out",
            True,
        ),
    ],
)
def test_an_error_of_vllms_becomes_one_that_says_what_to_do(
    error: str, says: str, helps: str, stays: bool
) -> None:
    refused = refusal_of(error)
    assert refused is not None
    assert says in refused.why and helps in refused.remedy
    assert is_final(error) == stays


@pytest.mark.parametrize(
    "error",
    [
        "something that nobody has seen yet",
        "ImportError: cannot import name 'require_odd' from 'odd' (/odd/install.py)",
        "ImportError: libodd.so.12: cannot open shared object file: No such file or directory",
        "ImportError: /lib/libodd.so.6: version `ODD_3' not found (required by /odd/_C.abi3.so)",
        "ModuleNotFoundError: No module named 'odd.moved'",
        "ModuleNotFoundError: No module named 'triton'",
        "ImportError: attempted relative import with no known parent package",
    ],
)
def test_an_unknown_error_stays_as_it_is(error: str) -> None:
    """Also one of an installation that is broken, which no package mends, and of which some mechanism may have asked."""
    assert refusal_of(error) is None
    assert not is_final(error)


def test_what_a_user_insists_on_is_said_with_the_settings_to_take_away() -> None:
    refused = CannotHave({"adapters": "vLLM has no LoRA for OddForCausalLM"})
    assert "OddForCausalLM" in refused.why and "--adapters on and --lora-module" in refused.remedy
