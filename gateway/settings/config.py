"""The settings of a gateway: one frozen, flat `Config`, of the engine's settings (`engine_bridge/settings/engine_config.py`) and the server's own.

Files that belong to the project (the page, the demo model) lie beside the packages in a checkout. A wheel holds copies of them in
`gateway/files`, in the same folders (setup.py makes them). `PROJECT_ROOT` is whichever of the two is there, and nothing else computes it.
"""

import ipaddress
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from engine_bridge.calls.context_overflow import ContextOverflow
from engine_bridge.calls.plain_content import ContentFormat, SpecialTokensInContent
from engine_bridge.policy.limits.request_limits import RequestLimits
from engine_bridge.policy.nodes import routing
from engine_bridge.settings.engine_config import (
    KIB,
    ModelName,
    NonEmpty,
    Positive,
    PositiveNumber,
    in_adapters,
    in_kv_tiers,
    in_model,
    in_scheduling,
    in_server,
    setting,
)
from gateway.access.hosts import as_origin
from gateway.errors import StartupError
from gateway.settings.data_folder import tighten
from gateway.settings.declared import Setting, settings_of, shown
from gateway.settings.tls import TlsSettings

_PACKAGE = Path(__file__).resolve().parents[1]
PROJECT_ROOT = _PACKAGE / "files" if (_PACKAGE / "files").is_dir() else _PACKAGE.parent
STATIC_DIR = PROJECT_ROOT / "static"
DEMO_MODEL_DIR = PROJECT_ROOT / "demo" / "model"
DEMO_ADAPTERS_DIR = PROJECT_ROOT / "demo" / "adapters"
DEMO_MODEL_NAME = "overture-demo"

MIB = 1024 * KIB
# Settings that vLLM's API classes have as arguments of the same name.
API_SWITCHES = ("enable_force_include_usage", "return_tokens_as_token_ids")
# Measured: 50,000 values are decoded and validated in 20 to 60 ms.
MIN_JSON_VALUES = 50_000

# Settings that only our own policies read.
SCHEDULING_SETTINGS = ("length_predictor", "tenant_weights", "client_priority")
EnginePlace = Literal["auto", "in-process", "process"]
LogFormat = Literal["plain", "json"]
if TYPE_CHECKING:
    RoutingChoice = str
else:  # mypy wants to read the words
    RoutingChoice = Literal[("auto", *routing.POLICIES)]
LogLevel = Literal["debug", "info", "warning", "error"]
in_access = partial(setting, "Access")
in_cluster = partial(setting, "Cluster")
in_embeddings = partial(setting, "Embeddings")


class ConfigError(StartupError):
    """A setting is unknown, of the wrong type, or cannot be used. The message is one line, fit to show a user."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return the default folder for sessions: `$XDG_DATA_HOME/overture`, else `~/.local/share/overture`."""
    xdg = environ.get("XDG_DATA_HOME", "")
    # The XDG base directory specification says that a relative value is to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path("~/.local/share").expanduser()
    return base / "overture"


class Config(TlsSettings, frozen=True, kw_only=True):
    """Every setting of the server, checked. Build it with `load_config`, or directly in tests.

    `served_model_name`, `adapters_dir` and `cpu_threads` are filled in from `model` when they are left empty, `kv_dir` from `data_dir` and
    `engine` from `host` and `uds`, so readers need no fallback.
    """

    model: ModelName = str(DEMO_MODEL_DIR)

    host: Annotated[str, in_server("Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, in_server("Port to listen on; 0 takes any free one.", ge=0, le=65535)] = 8000
    uds: Annotated[
        Path | None,
        in_server(
            "Unix socket to listen on in place of host and port; only this user can connect (mode 0600)."
        ),
    ] = None
    data_dir: Annotated[Path, in_server("Folder of the session database, made if missing (mode 0700).")] = (
        msgspec.field(default_factory=lambda: default_data_dir(os.environ))
    )
    engine: Annotated[
        EnginePlace,
        in_server(
            "Where the engine runs: in-process, or in a process of its own, whose crash ends no conversation; "
            "auto: in-process on loopback, else in a process."
        ),
    ] = "auto"
    root_path: Annotated[
        str,
        in_server(
            "Path under which a reverse proxy serves this server, such as /llm; the proxy removes it. For links in /openapi.json."
        ),
    ] = ""
    drain_timeout_s: Annotated[
        float, in_server("After SIGTERM, seconds that running answers are given to finish.", ge=0)
    ] = 30.0
    log_format: Annotated[LogFormat, in_server("Plain lines for people, JSON lines for collectors.")] = (
        "plain"
    )
    log_level: Annotated[LogLevel, in_server("Least severe message that is logged.")] = "info"

    nodes: Annotated[
        int,
        in_cluster(
            "Engines on this machine, which share its cores and memory; above 1 each is a process that Ray places. 0: only nodes that join.",
            ge=0,
            le=1024,
        ),
    ] = 1
    ray_address: Annotated[
        str | None, in_cluster("Ray cluster to join, HOST:PORT; unset: with several nodes one is started.")
    ] = None
    cluster_host: Annotated[
        NonEmpty, in_cluster("Address of this machine that its nodes listen on for gateways and each other.")
    ] = "127.0.0.1"
    cluster_port: Annotated[
        int,
        in_cluster("Port where other machines join the Ray that this one starts; 0: any.", ge=0, le=65535),
    ] = 0
    cluster_token_file: Annotated[
        Path | None,
        in_cluster(
            "File of the cluster's secret, the same on all machines; unset: cluster-token in the data folder, made if missing."
        ),
    ] = None
    cluster_cert: Annotated[
        Path | None,
        in_cluster("TLS certificate (PEM) of the cluster; needed when nodes listen beyond loopback."),
    ] = None
    cluster_key: Annotated[
        Path | None, in_cluster("Private key of that certificate (PEM), on all machines, too.")
    ] = None
    node_name: Annotated[
        str,
        in_cluster("Name of this machine's node, or nodes, in a cluster that it joins; empty: the host's."),
    ] = ""

    chat_template: Annotated[
        NonEmpty | None,
        in_model("Jinja file, or a template in one line, to use in place of the model's own template."),
    ] = None
    chat_template_content_format: Annotated[
        ContentFormat,
        in_model(
            "The form in which the chat template gets the content of a message: one text (string) or parts (openai); auto: as the template reads it."
        ),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        NonEmpty | None,
        in_model(
            "Arguments of the chat template for every conversation, as a JSON object; a request's own chat_template_kwargs win."
        ),
    ] = None
    enable_force_include_usage: Annotated[
        bool, in_model("End every stream with its usage, as where a request's stream_options ask for it.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, in_model("Write tokens beside log probabilities as token_id:N, as where a request asks for it.")
    ] = False
    tool_parser: Annotated[
        str,
        in_model(
            "vLLM's parser for tool calls, such as hermes; auto: by the model's family; none: calls that a model writes by itself stay text."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        in_model(
            "vLLM's parser for reasoning text, such as qwen3; auto: by the model's family; none: reasoning is part of the answer."
        ),
    ] = "auto"

    tool_parser_plugin: Annotated[
        NonEmpty | None,
        in_model("Python file, or module, that registers a tool parser of your own with vLLM."),
    ] = None
    reasoning_parser_plugin: Annotated[
        NonEmpty | None, in_model("The same for a parser of reasoning text.")
    ] = None

    context_overflow: Annotated[
        ContextOverflow,
        in_model(
            "What an API call may leave out where its prompt does not fit: nothing (error), tools that the model cannot call by itself "
            "or that are longer than the conversation (drop-tools), or the oldest turns as well (drop-oldest). The reply says what was left out."
        ),
    ] = "drop-tools"

    special_tokens_in_content: Annotated[
        SpecialTokensInContent,
        in_model(
            "What messages that write a special token, such as <|im_start|>, have: that token (keep, as vLLM), or its letters as any text (split). "
            "Choose split where users, tools or documents are not trusted: with keep, their text can pass for the system's or end a message."
        ),
    ] = "keep"

    embedding_model: Annotated[
        NonEmpty | None,
        in_embeddings(
            "Folder of an embedding model, or its name on a model hub: it answers /v1/embeddings, in a process of its own. Unset: none is served."
        ),
    ] = None
    embedding_model_name: Annotated[
        str, in_embeddings("Name that clients use for it; empty: the last part of its path.")
    ] = ""
    embedding_engine_args: Annotated[
        tuple[NonEmpty, ...],
        in_embeddings("Engine argument of vLLM's for it, as NAME=VALUE, such as max_model_len=512."),
    ] = ()
    rerank_model: Annotated[
        NonEmpty | None,
        in_embeddings(
            "Folder of a model that scores texts, or its name on a model hub: it answers /rerank and /score, in a process of its own. "
            "Unset: the embedding model answers them."
        ),
    ] = None
    rerank_model_name: Annotated[
        str, in_embeddings("Name that clients use for it; empty: the last part of its path.")
    ] = ""
    rerank_engine_args: Annotated[
        tuple[NonEmpty, ...],
        in_embeddings("Engine argument of vLLM's for it, as NAME=VALUE, such as hf_overrides={…}."),
    ] = ()
    rerank_chat_template: Annotated[
        NonEmpty | None,
        in_embeddings(
            "Jinja file, or a template in one line, that puts a query and a text together for it. Unset: as the model needs it, where that is known."
        ),
    ] = None
    embedding_threads: Annotated[
        int, in_embeddings("Processor cores that each of these processes may use: the first ones.", ge=1)
    ] = 1
    embedding_kv_cache_gib: Annotated[
        PositiveNumber,
        in_embeddings(
            "Memory for what each keeps of inputs while it reads them, in GiB: the longest input is what fits."
        ),
    ] = 0.5

    titles: Annotated[
        Literal["auto", "model", "first-words"],
        in_model(
            "What names a conversation: the words that it begins with (first-words), or the model, once the engine is idle after the first "
            "answer (model). auto: the model, but for the demo model, which is too small."
        ),
    ] = "auto"

    draft_prefill: Annotated[
        bool,
        in_kv_tiers(
            "Compute a question while it is typed, for users who allow it. Drafts are never stored or logged."
        ),
    ] = False

    learned_advisories: Annotated[
        bool,
        in_kv_tiers(
            "Learn which agent's request follows which (X-Agent-Name), and warm its session in advance."
        ),
    ] = False

    length_predictor: Annotated[
        str | None,
        in_scheduling("Your own predictor of answer lengths, as module:Name; where it fails, ours answers."),
    ] = None
    tenant_weights: Annotated[
        tuple[NonEmpty, ...],
        in_scheduling("Share of the owner of a key, as NAME=2 with the key's name; the others have 1."),
    ] = ()
    client_priority: Annotated[
        bool, in_scheduling("Let clients put requests before those of others (priority below 0), too.")
    ] = False

    routing_policy: Annotated[
        RoutingChoice,
        in_scheduling(
            "Which of several nodes serves; auto: the least time added to all answers, once a node knows its speed."
        ),
    ] = "auto"

    adapters_dir: Annotated[
        Path | None, in_adapters("Folder with one LoRA adapter (PEFT format) in each subfolder.")
    ] = None
    allow_adapter_loading: Annotated[
        bool, in_adapters("Let clients load and unload adapters while the server runs.")
    ] = False

    api_keys: Annotated[
        tuple[NonEmpty, ...],
        in_access("A key that clients must send. Others on this machine can see flags: prefer a key file."),
    ] = ()
    api_key_file: Annotated[
        Path | None, in_access("File of people and their hashed keys, from `overture users add`.")
    ] = None
    operator_keys: Annotated[
        tuple[NonEmpty, ...],
        in_access("A key like api_keys that may also read /metrics and change adapters."),
    ] = ()
    metrics_by_user: Annotated[
        bool,
        in_access(
            "Let /metrics tell the tokens of each person, and how right the predicted lengths of their answers are."
        ),
    ] = False
    cors_origins: Annotated[
        tuple[NonEmpty, ...],
        in_access(
            "An origin whose pages may call the API, such as https://chat.example.org; none: CORS is off."
        ),
    ] = ()
    max_body_bytes: Annotated[int, in_access("Largest HTTP body, in bytes.", ge=KIB)] = 16 * MIB
    max_frame_bytes: Annotated[
        int, in_access("Largest chat socket frame, in bytes.", ge=KIB, le=16 * MIB)
    ] = MIB
    max_sockets: Annotated[int, in_access("Most chat sockets open at once.", ge=1)] = 10_000
    max_connections: Annotated[
        Positive | None,
        in_access("Most connections open at once; unset: what the limit of open files allows."),
    ] = None
    max_connections_per_address: Annotated[
        Positive | None,
        in_access("Most connections of one address that has shown no key; unset: half of all, at most 1024."),
    ] = None
    trusted_proxies: Annotated[
        tuple[NonEmpty, ...],
        in_access(
            "Address or network of a reverse proxy: the limit for one address does not apply to it or to this machine."
        ),
    ] = ()
    trusted_user_header: Annotated[
        str,
        in_access(
            "Header by which a reverse proxy names the person whom it has signed in, such as X-Forwarded-User; "
            "read from this machine and from --trusted-proxy only. Empty: no header is believed."
        ),
    ] = ""
    add_trusted_users: Annotated[
        bool,
        in_access("Add a person whom the proxy or the OIDC provider names for the first time, as a member."),
    ] = False
    oidc_issuer: Annotated[
        str,
        in_access(
            "OpenID Connect provider at which people may sign in, such as https://login.example.org; its settings must list "
            "this server's /v1/sign-in/oidc/callback. Empty: none."
        ),
    ] = ""
    oidc_client_id: Annotated[str, in_access("What the provider calls this server.")] = ""
    oidc_client_secret_file: Annotated[
        Path | None, in_access("File of this server's secret there; unset: it has none (PKCE alone).")
    ] = None
    oidc_claim: Annotated[
        NonEmpty,
        in_access(
            "What the provider says of a person that is the person's name here: email (verified ones only), or another that people "
            "cannot change by themselves."
        ),
    ] = "email"
    head_timeout_s: Annotated[
        float, in_access("Seconds in which a request's head must have arrived.", gt=0)
    ] = 10.0
    body_timeout_s: Annotated[
        float, in_access("Seconds that a request's body may pause while it arrives.", gt=0)
    ] = 20.0
    keepalive_timeout_s: Annotated[
        float, in_access("Seconds that a connection may be idle between two requests.", gt=0)
    ] = 75.0

    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Setting name -> where its value came from; a setting that is not in it has its default."""

    def __post_init__(self) -> None:
        # force_setattr is msgspec's own way to finish a frozen struct inside __post_init__.
        if not self.served_model_name:
            name = DEMO_MODEL_NAME if self.is_demo_model else self.model.rstrip("/").rsplit("/", 1)[-1]
            msgspec.structs.force_setattr(self, "served_model_name", name)
        for setting_name in ("embedding_model", "rerank_model"):
            path: str | None = getattr(self, setting_name)
            if path is not None and not getattr(self, f"{setting_name}_name"):
                name = path.rstrip("/").rsplit("/", 1)[-1]
                msgspec.structs.force_setattr(self, f"{setting_name}_name", name)
        if self.root_path:
            msgspec.structs.force_setattr(self, "root_path", f"/{self.root_path.strip('/')}".rstrip("/"))
        if self.adapters_dir is None and self.is_demo_model:
            msgspec.structs.force_setattr(self, "adapters_dir", DEMO_ADAPTERS_DIR)
        if self.cluster_token_file is None:
            msgspec.structs.force_setattr(self, "cluster_token_file", self.data_dir / "cluster-token")
        if self.engine == "auto":
            # It costs nothing that can be measured: docs/decisions/0015.
            place = "in-process" if self.is_loopback else "process"
            msgspec.structs.force_setattr(self, "engine", place)
        if self.titles == "auto":
            msgspec.structs.force_setattr(self, "titles", "first-words" if self.is_demo_model else "model")
        if self.kv_dir is None:
            msgspec.structs.force_setattr(self, "kv_dir", self.data_dir / "kv")
        origins = tuple(as_origin(written) or written for written in self.cors_origins)
        msgspec.structs.force_setattr(self, "cors_origins", origins)
        if self.cpu_threads is None and self.is_demo_model:
            # Its matrices are too small to share between cores: docs/decisions/0005.
            msgspec.structs.force_setattr(self, "cpu_threads", 1)

    @property
    def parser_plugins(self) -> tuple[str, ...]:
        """The modules that register parsers of the operator's own, each once."""
        found = (self.tool_parser_plugin, self.reasoning_parser_plugin)
        return tuple(dict.fromkeys(plugin for plugin in found if plugin))

    @property
    def request_limits(self) -> RequestLimits:
        """The limits that the node checks."""
        return RequestLimits(**{name: getattr(self, name) for name in RequestLimits.__struct_fields__})

    def json_values(self, max_model_len: int, at_least: int = 0) -> int:
        """Return the most values that one JSON body may have, for a model of this context: a prompt may be a list of numbers.

        at_least: for bodies that may be longer than a prompt.
        """
        return self.max_json_values or max(MIN_JSON_VALUES, 4 * max_model_len, at_least)

    @property
    def is_cluster(self) -> bool:
        """Whether Ray places the nodes; otherwise the server has a single node, which does not need Ray."""
        return self.nodes != 1 or self.ray_address is not None or not _is_loopback(self.cluster_host)

    @property
    def is_demo_model(self) -> bool:
        """Whether `model` is the small model that comes with the project."""
        return Path(self.model).expanduser().resolve() == DEMO_MODEL_DIR

    @property
    def profile_dir(self) -> Path:
        """The folder in which `overture profile` keeps its measurements."""
        return self.data_dir / "profiles"

    @property
    def weights_memory(self) -> Path:
        """The file that remembers hashes of the model's files, so that they are not read whole at each start."""
        return self.data_dir / "weights.json"

    @property
    def kernel_cache(self) -> Path:
        """The folder in which a GPU's compiled kernels are kept over restarts."""
        return self.data_dir / "kernels"

    @property
    def has_api_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_keys or self.operator_keys) or self.api_key_file is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or _is_loopback(self.host)

    def warnings(self) -> list[str]:
        """Return what the operator should know before the server starts, one sentence each."""
        found = []
        if not self.is_loopback and not self.has_api_keys:
            found.append(
                f"Anyone who reaches {self.host}:{self.port} can use this server and read its sessions: no API key is set. "
                "Make one with `overture keys new`, or listen on 127.0.0.1."
            )
        found += [
            f"cors_origins holds {origin!r}, which no browser sends: write an origin whole and alone, such as https://chat.example."
            for origin in self.cors_origins
            if as_origin(origin) is None
        ]
        if "*" in self.cors_origins and not self.has_api_keys:
            found.append(
                "cors_origins holds '*' and no API key is set: any web page that a user opens can use this server."
            )
        if self.scheduling_policy == "vllm":
            unused = [name for name in SCHEDULING_SETTINGS if getattr(self, name)]
            if unused:
                found.append(
                    f"{' and '.join(unused)} change nothing with vLLM's own queue: choose another --scheduling-policy."
                )
        return found

    def prepare_data_dir(self) -> Path:
        """Make `data_dir`, readable by its owner only, if it is missing; remove others' rights from an existing one.

        Raises ConfigError if it cannot be written.
        """
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data_dir: cannot make {self.data_dir}: {error.strerror}") from error
        if not os.access(self.data_dir, os.W_OK | os.X_OK):
            raise ConfigError(f"data_dir: {self.data_dir} is not writable by this user")
        tighten(self.data_dir, self.kv_dir, (self.adapters_dir, Path(self.model)))
        return self.data_dir

    def describe(self) -> str:
        """Return a table of all settings: name, value (secrets masked) and source."""
        rows = [(setting.name, shown(setting.name, getattr(self, setting.name))) for setting in SETTINGS]
        name_width = max(len(name) for name, _ in rows)
        value_width = min(48, max(len(value) for _, value in rows))
        return "\n".join(
            f"{name:<{name_width}}  {value:<{value_width}}  {self.sources.get(name, 'default')}"
            for name, value in rows
        )

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{setting.name}={shown(setting.name, getattr(self, setting.name))}" for setting in SETTINGS
        )
        return f"Config({fields})"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


SETTINGS: Sequence[Setting] = settings_of(Config)
