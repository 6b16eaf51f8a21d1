"""What an engine is built from: plain data that the gateway fills in and the driver reads.

Each setting that a user may make is declared here once: its name, type, bounds, default and what it says in the help. The gateway's `Config`
adds its own to them; flags, environment and file follow from the declaration.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from engine_bridge.policy.adapters import adapter_cache
from engine_bridge.policy.limits.grammar_room import MIB, default_room_bytes
from engine_bridge.policy.scheduling import lanes, policies
from engine_bridge.settings.engine_arguments import named
from engine_bridge.settings.lora_modules import is_of_hub, parse_lora_modules
from engine_bridge.settings.parser_choice import AUTO

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
GIB = 1 << 30
# The default on a CPU. Chosen: the demo model's conversations of a small team, on a laptop.
CPU_KV_CACHE_BYTES = GIB
# Requests of one batch on a CPU, where they are not set. Chosen: more would make each step too long.
CPU_NUM_SEQS = 64
# The least that vLLM chooses on a GPU: 256 to 1,024, by the GPU's memory. Source: vLLM 0.32, EngineArgs.get_batch_defaults.
LEAST_GPU_NUM_SEQS = 256
# As max_model_len vLLM takes it for the longest context that its KV cache has room for, up to the model's own.
WHATEVER_FITS = -1

Positive = Annotated[int, Meta(ge=1)]
PositiveNumber = Annotated[float, Meta(gt=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]
KIB = 1024
if TYPE_CHECKING:
    SchedulingPolicy = str
    AdapterPolicy = str
    LaneRule = str
else:  # mypy wants to read the words
    # "vllm": its own queue, first come first served.
    SchedulingPolicy = Literal[("vllm", *policies.POLICIES)]
    AdapterPolicy = Literal[tuple(reversed(adapter_cache.POLICIES))]
    LaneRule = Literal[tuple(lanes.RULES)]


def setting(group: str, description: str, **constraints: Any) -> Meta:
    """Describe a setting for the help and for error texts."""
    return Meta(description=description, extra={"group": group}, **constraints)


in_model = partial(setting, "Model")
in_engine = partial(setting, "Engine")
in_server = partial(setting, "Server")
in_limits = partial(setting, "Limits")
in_kv_tiers = partial(setting, "KV tiers")
in_scheduling = partial(setting, "Scheduling")
in_adapters = partial(setting, "Adapters")

ModelName = Annotated[str, in_model("Model folder, or its name on a model hub.", min_length=1)]


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The settings of an engine that a user may make. Memory in GiB; lengths in tokens."""

    model: ModelName
    served_model_name: Annotated[
        str, in_model("Name that clients use for the base model; empty: the last part of the model's path.")
    ] = ""
    served_model_aliases: Annotated[
        tuple[NonEmpty, ...],
        in_model("Another name that requests may use for the base model; replies have the first."),
    ] = ()
    device: Annotated[
        Device, in_model("Where the engine runs; auto: what the installed vLLM was built for.")
    ] = "auto"
    dtype: Annotated[Dtype, in_model("Type of the weights and activations.")] = "auto"
    max_model_len: Annotated[
        Positive | Literal["auto"] | None,
        in_model(
            "Longest prompt and answer together, in tokens; unset: what the model allows; auto: as much of that as the KV cache holds."
        ),
    ] = None
    seed: Annotated[int, in_model("Seed of sampling.", ge=0)] = 0

    max_num_seqs: Annotated[
        Positive | None,
        in_engine("Largest number of requests in one batch; unset: 64 on a CPU, vLLM's choice on a GPU."),
    ] = None
    block_size: Annotated[Positive | None, in_engine("Tokens of a KV block; unset: vLLM's choice.")] = None
    kv_cache_gib: Annotated[
        PositiveNumber | None,
        in_engine(
            "KV cache on the device, in GiB; unset: 1 on a CPU, what --gpu-memory-utilization leaves on a GPU."
        ),
    ] = None
    cpu_threads: Annotated[
        Positive | None,
        in_engine("Processor cores that a CPU engine computes on; unset: all (the demo model: 1)."),
    ] = None
    """The last ones that this process may use."""
    gpu_memory_utilization: Annotated[float, in_engine("Share of the GPU's memory to use.", gt=0, le=1)] = 0.9
    tensor_parallel_size: Annotated[
        int, in_engine("Devices that one engine's model is split over, each a process of its own.", ge=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool, in_engine("Give each of these devices whole experts, in place of a part of every expert.")
    ] = False

    max_num_batched_tokens: Annotated[
        Positive | None, in_engine("Most tokens that one step computes; unset: vLLM's choice.")
    ] = None
    quantization: Annotated[
        NonEmpty | None,
        in_engine("How the weights are quantised, such as awq, gptq or fp8; unset: as the model says."),
    ] = None
    kv_cache_dtype: Annotated[
        NonEmpty, in_engine("Type of the KV cache, such as fp8; auto: that of the model.")
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool,
        in_engine(
            "Reuse the KV of what prompts have in common; without it there are neither KV tiers nor advisories."
        ),
    ] = True
    enforce_eager: Annotated[
        bool, in_engine("Compile nothing and capture no CUDA graphs; on a CPU that is always so.")
    ] = False
    enable_prompt_embeds: Annotated[
        bool,
        in_engine(
            "Take embeddings in place of text in /v1/completions (prompt_embeds). Only for clients that you trust: torch decodes them."
        ),
    ] = False
    enable_sleep_mode: Annotated[
        bool,
        in_engine(
            "Let operators free the GPU's memory for a while by POST /sleep and /wake_up; conversations keep their KV. Not on a CPU."
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, in_engine("Run code that comes with the model. Only for models that you trust.")
    ] = False
    revision: Annotated[
        NonEmpty | None, in_engine("Branch, tag or commit of a model on a hub; unset: its default.")
    ] = None
    download_dir: Annotated[
        Path | None, in_engine("Folder for models that are fetched from a hub; unset: the hub's own.")
    ] = None
    speculative_config: Annotated[
        NonEmpty | None, in_engine("vLLM's speculative decoding, as a JSON object.")
    ] = None
    engine_args: Annotated[
        tuple[NonEmpty, ...],
        in_engine("Any other engine argument of vLLM's, as NAME=VALUE; some are refused, with the reason."),
    ] = ()

    otlp_endpoint: Annotated[
        NonEmpty | None,
        in_server(
            "Send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318; unset: none."
        ),
    ] = None

    max_images: Annotated[
        int,
        in_limits(
            "Most pictures in one call; 0: none, and the model is loaded without the part that reads them.",
            ge=0,
        ),
    ] = 16
    max_image_mpixels: Annotated[
        float, in_limits("Largest picture, in millions of pixels; bytes are bounded by max_body_bytes.", gt=0)
    ] = 50.0
    grammar_memory_mib: Annotated[
        Positive | None,
        in_limits(
            "Memory for the grammars of all running answers, in MiB; unset: 1024, or 16 for each of max_num_seqs (on a GPU, of 256)."
        ),
    ] = None

    kv_host_gib: Annotated[
        float,
        in_kv_tiers(
            "Host memory for KV that leaves the engine's cache, in GiB; 0: KV is kept neither there nor on disk.",
            ge=0,
        ),
    ] = 2.0
    kv_disk_gib: Annotated[
        float, in_kv_tiers("Disk space for KV, in GiB: conversations outlive a restart; 0: none.", ge=0)
    ] = 8.0
    kv_dir: Annotated[Path | None, in_kv_tiers("Folder of the KV on disk; unset: kv in the data folder.")] = (
        None
    )

    scheduling_policy: Annotated[
        SchedulingPolicy,
        in_scheduling(
            "Which request starts next: bounded has short ones first but lets none wait longer, mlq has lanes by size, vllm is vLLM's own queue."
        ),
    ] = policies.DEFAULT_POLICY
    lane_rule: Annotated[
        LaneRule,
        in_scheduling(
            "How mlq chooses the number of lanes: at the knee of the fit, or by the paper's least_squares."
        ),
    ] = "knee"
    lane_refit_s: Annotated[
        float, in_scheduling("Seconds between two fits of the lanes and the length predictor.", gt=0)
    ] = 60.0
    max_step_ms: Annotated[
        float,
        in_scheduling(
            "Longest step of the engine, in milliseconds; prompts that would take longer are computed in parts; 0: no limit.",
            ge=0,
        ),
    ] = 500.0
    """Not for vLLM's own queue."""
    urgent_tpot_ms: Annotated[
        float,
        in_scheduling(
            "Pause other requests while urgent ones (priority below 0) would wait longer than this for each token; 0: never pause.",
            ge=0,
        ),
    ] = 100.0
    """Two tokens in the time in which people read one (MLPerf Inference, Llama 2 70B: 200 ms a token)."""
    delta_ms: Annotated[
        float,
        in_scheduling(
            "Send an answer's tokens at most this often, in milliseconds: what comes meanwhile is sent together. 0: after each step.",
            ge=0,
            le=1000,
        ),
    ] = 50.0
    """The first and the last token of an answer are sent at once. Why not each: docs/decisions/0002."""

    adapters: Annotated[
        Literal["auto", "on", "off"],
        in_adapters("Serve LoRA adapters; auto: where this model can have them on this device."),
    ] = "auto"
    lora_modules: Annotated[
        tuple[NonEmpty, ...],
        in_adapters(
            "An adapter in addition to those of the folder, as NAME=FOLDER, or NAME=REPOSITORY of a hub."
        ),
    ] = ()
    max_loras: Annotated[
        int,
        in_adapters(
            "Adapters of the largest rank that may be in use at once; on a CPU more of smaller ones, in the same memory.",
            ge=1,
        ),
    ] = 8
    max_lora_rank: Annotated[int, in_adapters("Largest adapter rank.", ge=1)] = 128
    adapter_host_gib: Annotated[
        float, in_adapters("Host memory for adapters that are in use or may be soon, in GiB.", gt=0)
    ] = 1.0
    adapters_in_kv: Annotated[
        bool, in_adapters("Also keep unused adapters in KV memory that is free at the moment.")
    ] = True
    adapter_policy: Annotated[AdapterPolicy, in_adapters("Which adapters are evicted from memory first.")] = (
        "adaptive"
    )
    adapter_prefetch: Annotated[
        bool,
        in_adapters(
            "Load an adapter before its next request, predicted from the times between its last ones."
        ),
    ] = False
    cpu_assist: Annotated[
        bool, in_adapters("Start requests while their adapter is still on its way to the device.")
    ] = True
    cpu_assist_workers: Annotated[
        int,
        in_adapters(
            "Worker processes that compute for adapters on their way to the device; 0: the engine does it.",
            ge=0,
        ),
    ] = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use for the base model. Replies have the first."""
        return tuple(dict.fromkeys((self.served_model_name, *self.served_model_aliases)))


def kv_cache_bytes(kv_cache_gib: float | None, device: str) -> int | None:
    """Return the bytes of KV on the device; None: all that `gpu_memory_utilization` leaves."""
    if kv_cache_gib is not None:
        return int(kv_cache_gib * GIB)
    return CPU_KV_CACHE_BYTES if device == "cpu" else None


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """A user's settings, and what only the server, benches and tests set. By itself an engine has a CPU and no tiers."""

    served_model_name: str
    device: Device = "cpu"
    kv_host_gib: float = 0.0
    kv_disk_gib: float = 0.0
    num_kv_blocks: int | None = None
    """Blocks of KV on the device, whatever memory there is; None: as many as fit."""
    enable_lora: bool = True
    """Whether this engine is built with adapters: see `adapters` for what the user wishes."""
    profile_dir: Path | None = None
    """Folder of profiles (engine_bridge/settings/profile.py); None: costs are learned from real steps alone."""
    weights_memory: Path | None = None
    """File that remembers what is in the model's files, so that they are not read whole at each start (kvtiers/weights.py); None: nothing does."""
    kernel_cache: Path | None = None
    """Folder in which a GPU's compiled kernels are kept over restarts; None: where vLLM and Triton keep them."""
    log_stats: bool = True
    reasoning_parser: str = AUTO
    """vLLM's parser of the model's reasoning, AUTO for that of the model's family, or NONE."""
    parser_plugins: tuple[str, ...] = ()
    """Modules with parsers of the operator's own, by name or as files."""
    chat_template: str | None = None
    """The operator's template; None: the model's own."""

    @property
    def needs_adapters(self) -> bool:
        """Whether the user has asked for adapters, so that a server without them would be no help."""
        return self.adapters == "on" or bool(self.lora_modules)

    @property
    def is_all_here(self) -> bool:
        """Whether the model, its tokenizer, its drafts and adapters are folders of this machine, so that no hub need be asked for any."""
        if any(is_of_hub(place) for _, place in parse_lora_modules(self.lora_modules)):
            return False
        given, drafts = named(self.engine_args), json.loads(self.speculative_config or "{}")
        others = [given.get(name) for name in ("tokenizer", "hf_config_path", "spec_model")]
        others.append(drafts.get("model") if isinstance(drafts, dict) else None)
        return all(Path(each).exists() for each in (self.model, *others) if each)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether vLLM knows log probabilities of prompts: not where layers that share others' KV skip all but a prompt's last token."""
        skips = named(self.engine_args).get("kv_sharing_fast_prefill", "false")
        return skips.lower() in ("false", "0")

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of KV on the device; None: all that `gpu_memory_utilization` leaves."""
        return kv_cache_bytes(self.kv_cache_gib, self.device)

    @property
    def batch_seqs(self) -> int | None:
        """Largest number of requests in one batch, as vLLM is told; None: vLLM chooses it by the GPU."""
        if self.max_num_seqs is not None or self.device != "cpu":
            return self.max_num_seqs
        return min(CPU_NUM_SEQS, self.max_num_batched_tokens or CPU_NUM_SEQS)

    @property
    def sure_seqs(self) -> int:
        """The number of requests that a batch may hold at least: what limits reckon with before vLLM has chosen."""
        return self.batch_seqs or LEAST_GPU_NUM_SEQS

    @property
    def grammar_bytes(self) -> int:
        """Bytes for the compiled grammars of all running answers together."""
        mib = self.grammar_memory_mib
        return default_room_bytes(self.sure_seqs) if mib is None else mib * MIB

    @property
    def is_eager(self) -> bool:
        """Whether vLLM compiles nothing. On a CPU it never does: it compiles nothing there once LoRA is on (docs/decisions/0004)."""
        return self.device == "cpu" or self.enforce_eager
