"""Why vLLM cannot serve a model at all, and what to do, by its facts and by the errors that vLLM ends with."""

from __future__ import annotations

import re

from engine_bridge.policy.limits.model_support import ModelFacts, UnusableModel

ANOTHER_DEVICE = "Serve it on another device (on a GPU: --device cuda), or serve another model"
# What no adapter and no tier changes: of these one try is enough.
OTHER_WEIGHTS = "Serve weights of this model that are quantised otherwise or not at all, or serve it on another device (on a GPU: --device cuda)"
OTHER_SIZES = "Serve another model, or serve this one on another device (on a GPU: --device cuda)"
OTHER_DRAFTS = "Change --speculative-config, or take it away"
WHOLE_FILES = "Fetch the model again, with all its files, or serve another one. A draft model must be of the kind that --speculative-config names"
OTHER_RELEASE = "Fetch the model again, with all its files. Where they are whole, the class is at fault: try another release of vLLM"
GENERATING = "Serve a model that generates text. One that makes embeddings or scores may stand beside it: --embedding-model or --rerank-model FOLDER"
DIVIDING_PARTS = "Choose a --tensor-parallel-size that divides it"
OTHER_SETTING = "Change the setting, or take it away"
TRUSTED_CODE = "If you trust it: --trust-remote-code"
MISSING_PACKAGE = (
    "Install it into the server's Python environment (opencv is the package opencv-python-headless)"
)
PACKAGE_OF_KERNELS = (
    f"On a GPU, install it into the server's Python environment; no CPU can run it. {ANOTHER_DEVICE}"
)
MENDED_DEFAULTS = "Mend this value in the model's folder, or take it out of the file"
OTHER_MODEL = "Serve another model, or try a newer release of vLLM"


# The beginning of an error about a package that is lacking. One that is there in part, as one whose release or shared library does not fit, is not.
_LACKS = r"(?:ImportError|ModuleNotFoundError):\s*((?!\s|cannot import name|[^\n]*\.so\b)"
# What an error of vLLM's says, why that is ({0}, {1} … stand for the pattern's groups), and what to do. Seen in vLLM 0.32 and torch 2.13, with models
# that these do not serve. The first that fits counts.
_ERRORS = (
    (
        r"(?:contains custom code which must be executed|\btrust_remote_code=True)",
        "the model brings code of its own, which is not run unless it is trusted",
        TRUSTED_CODE,
    ),
    (
        rf"{_LACKS}[^\n]*(?i:flash_?infer|flash[_-]?attn|flashmla|tilelang|deep_?gemm|cutlass|hpc[ -]ops)[^\n]*)",
        "this model is computed by a package of kernels for GPUs, which is not here: {0}",
        PACKAGE_OF_KERNELS,
    ),
    (
        rf"{_LACKS}[^\n]*(?:No module named '(?!triton')\w+'|[Ii]nstall|[Rr]equire)[^\n]*)",
        "code that this model needs lacks a package: {0}",
        MISSING_PACKAGE,
    ),
    (
        r"'_OpNamespace' '\w+' object has no attribute '(\w+)'",
        "vLLM's build for this device lacks the operation {0}, with which this model computes",
        ANOTHER_DEVICE,
    ),
    (
        r"_C::(\w+)\(\) expected at most 0 argument",
        "vLLM's build for this device lacks the operation {0}, with which this model computes",
        ANOTHER_DEVICE,
    ),
    (
        r"Failed to find a kernel that can implement the (.*?)(?:\. Reasons.*)?$",
        "vLLM has no kernel for this device that computes this model's quantised weights: the {0}",
        OTHER_WEIGHTS,
    ),
    (
        r"(Marlin does not support [^.]*)",
        "vLLM has no kernel for this device that computes this model's quantised weights: {0}",
        OTHER_WEIGHTS,
    ),
    (
        r"(No \w+ MoE backend supports [^.]*|Unsupported \w+ MoE backend: \w+)",
        "vLLM has no kernel for this device that computes this model's quantised experts: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"(.*(?:supported only for|only supported on) (?:CUDA|GPU|XPU|ROCm).*)",
        "vLLM does not compute this model on this device: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"module '(triton[\w.]*)' has no attribute '(\w+)'",
        "vLLM computes this model with kernels of Triton's, which this device does not have ({0}.{1})",
        ANOTHER_DEVICE,
    ),
    (
        r"(Unsupported CPU attention configuration: \S+|Head dimension \d+ is not supported by MLA)",
        "vLLM's attention on a CPU does not have this model's sizes: {0}",
        OTHER_SIZES,
    ),
    (
        r"CPUAttentionBackendImpl\.__init__\(\) got an unexpected keyword argument '(\w+)'",
        "vLLM's attention on a CPU does not know what this model asks of it: {0}",
        OTHER_SIZES,
    ),
    (
        r"ValueError: (.* is not supported by (?:attention )?backend\S* CPU_\w+)",
        "vLLM does not compute this model on this device: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"NotImplementedError: (.*(?: requires the V2 model runner| not (?:supported|implemented) on CPU))",
        "vLLM does not compute this model on this device: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"^AssertionError: (.*(?:[Dd]raft|[Ss]pecul).*)",
        "vLLM cannot draft this model's tokens so: {0}",
        OTHER_DRAFTS,
    ),
    (
        r"^\w+Error: (.*(?:is not divisible by \d|% (?:self\.)?tp_size|[Tt]ensor parallel world size).*)",
        "vLLM cannot split this model over so many devices: {0}",
        DIVIDING_PARTS,
    ),
    (
        r"^AssertionError: (.+)",
        "a check of vLLM's own does not hold for this model on this device: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"(.*does not dispatch through the Transformers attention interface)",
        "vLLM has no class for this model, and cannot run that of transformers: {0}",
        OTHER_MODEL,
    ),
    (
        r"There is no module or parameter named '([^']*)' in (\w+)",
        "the weights are not those of {1}, which has no {0}",
        WHOLE_FILES,
    ),
    (
        r"Following weights were not initialized from checkpoint: \{?([^}]{0,200})",
        "the weights are not all here: {0}",
        WHOLE_FILES,
    ),
    (
        r"(Attempted to load weight [^\n]*)",
        "the sizes of the weights are not those that config.json gives: {0}",
        WHOLE_FILES,
    ),
    (
        r"[Vv]alidation error for (?:field|validator) '([^']*)':\s*(.*)",
        "config.json is wrong, at {0}: {1}",
        WHOLE_FILES,
    ),
    (
        r"'(\w+Config)' object has no attribute '(\w+)'",
        "config.json lacks {1}, which vLLM reads of a {0}",
        WHOLE_FILES,
    ),
    # Adapters are left out where theirs is wrong.
    (
        r"validation errors? for (?!LoRAConfig)\w+Config\n(\w+(?:\.\w+)*?)(?:\.\w+\[[^\n]*)?\n\s+(.*?) \[type=",
        "{0} is set wrong: {1}",
        OTHER_SETTING,
    ),
    (
        r"(`(?:max_new_tokens|early_stopping|compile_config|assistant_ensemble_weight)` must be .*|Invalid `cache_implementation` .*)",
        "generation_config.json is wrong: {0}",
        MENDED_DEFAULTS,
    ),
    (
        r"(No common block size for .*)",
        "attention on this device has no such blocks: {0}",
        "Change --block-size, or take it away",
    ),
    (
        r"(Load format `[^`]*` is not supported|Unknown (?:config format `|attention backend: ')[^`']*[`'])",
        "{0}",
        OTHER_SETTING,
    ),
    (
        r"(Cannot find the config file for \w+)",
        "the weights are not quantised so: {0}",
        "Take away --quantization",
    ),
    (
        r"(?:HFValidationError: .*|Invalid repository ID or local directory specified): ('[^']*')",
        "there is no folder {0}, and a model on a hub has no such name",
        OTHER_SETTING,
    ),
    (r"Value error, ([^\[]* is no longer supported)", "vLLM cannot serve this model: {0}", OTHER_MODEL),
    (
        r"(torch\.\w+ is not supported for quantization method [\w-]+\. Supported dtypes: \[[^\]]*\])",
        "{0}",
        "Choose another --dtype",
    ),
    (
        r"validation error for SchedulerConfig\s+Value error, (.*?) \[type=",
        "{0}",
        OTHER_SETTING,
    ),
    (
        r"validation error for VllmConfig\s+Value error, (.*?) \[type=",
        "vLLM cannot set this model up on this device: {0}",
        ANOTHER_DEVICE,
    ),
    (
        r"(No tokenizer registered for tokenizer_mode='[^']*'|This model requires `--tokenizer-mode \w+`)",
        "{0}",
        "Choose another --tokenizer-mode",
    ),
    (
        r"((?:Unknown RoPE scaling type|Missing required keys in `rope_).*)",
        "config.json is wrong: {0}",
        OTHER_MODEL,
    ),
    (r"(Cannot find any model weights.*|Error while deserializing header.*)", "{0}", WHOLE_FILES),
    (r"(Unsupported speculative method: '[^']*')", "{0} with this model", OTHER_DRAFTS),
)


def refusal(facts: ModelFacts) -> UnusableModel | None:
    """Return why a model cannot be computed, by its facts, as an error to raise; None where nothing is known against it."""
    if facts.has_encoder:
        return UnusableModel(
            f"{facts.architecture} reads its input by an encoder, and only models that continue a text are served",
            GENERATING,
        )
    if not facts.generates:
        return UnusableModel(
            f"{facts.architecture} generates no text here: by its files it makes embeddings or scores",
            GENERATING,
        )
    if facts.missing_operation:
        why = f"vLLM's build for this device lacks the operation {facts.missing_operation}, with which {facts.architecture} computes"
        return UnusableModel(why, ANOTHER_DEVICE)
    return None


def misfit(error: str) -> UnusableModel:
    """Return an error that vLLM met while it loaded weights as one that says what to do. error: its type and text."""
    if error.startswith("KeyError: "):
        why = f"vLLM's class for this model has no place for a weight of its files ({error})"
        return UnusableModel(why, OTHER_RELEASE)
    return UnusableModel(
        f"vLLM cannot put the weights into the model that config.json describes ({error})", WHOLE_FILES
    )


def is_final(error: str) -> bool:
    """Return whether an error of vLLM's stays the same whatever is left out. What a device lacks, adapters or tiers may have called for."""
    refused = refusal_of(error)
    return refused is not None and refused.remedy not in (ANOTHER_DEVICE, PACKAGE_OF_KERNELS)


def may_be_of_pictures(error: str) -> bool:
    """Return whether an error of vLLM's may come of what reads pictures: a package, a file or weights that it lacks."""
    lacks = r"ImportError|ModuleNotFoundError|[Pp]rocessor|not initialized from checkpoint:.*(?:visual|vision|image|multi_modal)"
    return re.search(lacks, error, re.DOTALL) is not None


def refusal_of(error: str) -> UnusableModel | None:
    """Return an error of vLLM's, by its text, as one that says what to do; None where that is not known."""
    for pattern, why, remedy in _ERRORS:
        if (found := re.search(pattern, error, re.DOTALL)) is not None:
            return UnusableModel(why.format(*found.groups()), remedy)
    return None
