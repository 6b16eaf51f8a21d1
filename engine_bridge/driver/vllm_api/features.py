"""The features that depend on names of vLLM's, and what happens to a server where one of these names has moved."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Feature(Struct, frozen=True):
    """A feature that works as a whole or not at all.

    Attributes:
        name: as logs and `overture doctor` say it.
        without: what a server without it does, as the end of a sentence.
        settings: the settings of `EngineConfig` with which it is off. None: nothing can be served without it.
        is_built_in: whether an engine that was built with it can no longer do without it.
        device: the device on which it matters, "cpu" or "cuda"; None: everywhere.
        at_start: whether a server needs it. Else a command or a bench does.
    """

    name: str
    without: str
    settings: tuple[tuple[str, Any], ...] | None = ()
    is_built_in: bool = False
    device: str | None = None
    at_start: bool = True

    @property
    def is_vital(self) -> bool:
        """Whether nothing can be served without this feature."""
        return self.at_start and self.settings is None


ENGINE = Feature("the engine", "nothing can be served", settings=None)
APIS = Feature("the APIs", "nothing can be served", settings=None)
GRAMMARS = Feature(
    "bounded grammars", "one client's grammar could stop everybody, so nothing is served", settings=None
)
SCHEDULING = Feature(
    "scheduling",
    "requests start in vLLM's own order (--scheduling-policy vllm)",
    settings=(("scheduling_policy", "vllm"),),
)
PACE = Feature(
    "short steps",
    "prompts are computed in vLLM's own pieces, and a long one holds everybody up (--max-step-ms 0)",
    settings=(("max_step_ms", 0.0),),
)
LORA = Feature("adapters", "no adapters are served", settings=(("enable_lora", False),), is_built_in=True)
CPU_LORA = replace(LORA, name="adapters on a CPU", device="cpu")
CUDA_LORA = replace(LORA, name="adapters on a GPU", device="cuda")
ADAPTERS_IN_KV = Feature(
    "adapters in KV blocks", "adapters are cached in host memory only", settings=(("adapters_in_kv", False),)
)
KV_TIERS = Feature(
    "KV tiers",
    "KV that leaves the device is lost (--kv-host-gib 0)",
    settings=(("kv_host_gib", 0.0), ("kv_disk_gib", 0.0)),
    is_built_in=True,
)
CUDA_COPIES = replace(KV_TIERS, name="KV tiers on a GPU", device="cuda")
RANKS = Feature("engines of several devices", "a model cannot be split (--tensor-parallel-size)")
CPU_RANKS = replace(RANKS, name="engines of several ranks on a CPU", device="cpu")
PROMOTION = Feature("promotion", "advisories bring no KV to the device")
TOKENIZER_TURNS = Feature(
    "turns at the tokenizer", "texts of all tenants are tokenised in the order in which they come"
)
KEPT_TOKENS = Feature(
    "kept token ids", "every turn's history is tokenised anew, and its KV may not be found again"
)
HALF_CHARACTERS = Feature(
    "answers behind half a character",
    "a prompt that ends inside a character comes back as the beginning of its answer",
)
SAMPLER_ROOM = Feature(
    "settings within a GPU's room for them",
    "one request with thousands of allowed tokens, or with many bad words, ends the answers of all",
    device="cuda",
)
BAD_WORDS = Feature("many bad words", "one request with hundreds of bad words makes every step longer")
EMBEDS_TOKEN = Feature(
    "grammars beside embeddings",
    "with --enable-prompt-embeds some models get no structured output",
)
PICTURE_CACHE = Feature(
    "pictures that are sent again",
    "a picture whose call was cancelled before it was queued fails once when it is sent again",
)
TEXT_ALONE = Feature(
    "models that read pictures as models of text",
    "with --max-images 0 a model in Mistral's own format has no KV tiers, and others keep room for pictures",
)
ROTARY = Feature(
    "positions of heads on a CPU",
    "models with latent attention and plain RoPE write wrong answers on a CPU",
    device="cpu",
)
MAMBA2 = Feature(
    "prefix caching of Mamba2 layers on a CPU",
    "models with Mamba2 layers compute every prompt as a whole on a CPU",
    device="cpu",
)
GATED_DELTA = Feature(
    "prompts of one token for gated delta nets on a CPU",
    "with gated delta nets a prompt of one token ends the answers of all requests",
    device="cpu",
)
EXPERT_ROUTING = Feature(
    "choice of experts on a CPU",
    "models that choose experts with a bias write wrong answers on a CPU, and those that do by sigmoids do not start",
    device="cpu",
)
QUERY_SCALES = Feature(
    "queries that grow with their position", "Ministral 3 writes wrong answers behind its first context"
)
MISSING_WEIGHTS = Feature(
    "weights that a model's files lack", "answers of a model with such weights are nonsense without a word"
)
SEEDS = Feature(
    "seeds on a CPU",
    "a request with a seed whose prompt takes several steps ends the answers of all requests",
    device="cpu",
)
DRAFT_GROUPS = Feature(
    "draft models beside several kinds of layers on a CPU",
    "with a draft model, answers of a model whose layers keep their KV in several groups are wrong on a CPU",
    device="cpu",
)
DRAFT_SETTINGS = Feature(
    "settings of drafted answers on a CPU",
    "with --speculative-config answers follow no temperature, and greedy ones beside them are wrong",
    device="cpu",
)
NEW_BLOCKS = Feature(
    "empty blocks on a CPU",
    "a request whose KV is no number spoils the answers of all requests behind it",
    device="cpu",
)
PLAIN_CONTENT = Feature(
    "special tokens of contents as text",
    "a server that is to keep them text (--special-tokens-in-content split) does not start",
)
ENVIRONMENT = Feature("vLLM's environment", "a variable that we set for vLLM does nothing")
CLIENT_FIELDS = Feature(
    "fields of the server", "a field that we keep clients from setting may have another name"
)
MODEL_FACTS = Feature(
    "facts of models",
    "what a model cannot have is found by building the engine with it, which takes longer",
)
MODEL_CLASSES = Feature(
    "looking at a model's class",
    "the first start with a model on a machine starts vLLM a second time, which takes longer",
    device="cpu",
)
REPORT = Feature("reasons of waiting", "metrics and the engine's page do not say why requests wait")
PROFILING = Feature("overture profile", "this machine cannot be measured", at_start=False)
EMBEDDINGS = Feature(
    "embeddings",
    "no model for embeddings or scores can be served (--embedding-model, --rerank-model)",
    at_start=False,
)
BENCHES = Feature("benches", "vLLM's own scheduler cannot be measured beside ours", at_start=False)

FEATURES = tuple(each for each in list(globals().values()) if isinstance(each, Feature))
"""All features above, in their order."""
