"""The settings of a gateway: one frozen, flat `Config`, and where each value comes from.

Later sources win: built-in defaults < config file (TOML) < environment (`OVERTURE_PORT` ...) < flags (`--port` ...).
Every setting has one name; the others follow from it: `max_num_seqs` is `max_num_seqs = 64` in the file,
`OVERTURE_MAX_NUM_SEQS` in the environment and `--max-num-seqs` on the command line.

Files that belong to the project (the page, the demo model) lie beside the packages, in the checkout that the
package was installed from (`pip install -e`); `PROJECT_ROOT` is that folder, and nothing else computes it.
"""

import difflib
import ipaddress
import logging
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from engine_bridge.policy.adapter_cache import POLICIES as ADAPTER_POLICIES
from engine_bridge.policy.registry import POLICIES
from engine_bridge.policy.request_limits import RequestLimits
from gateway.data_folder import tighten
from gateway.errors import StartupError
from gateway.standing import parse_weights

logger = logging.getLogger(__name__)

PROJECT_ROOT = Path(__file__).resolve().parent.parent
STATIC_DIR = PROJECT_ROOT / "static"
DEMO_MODEL_DIR = PROJECT_ROOT / "demo" / "model"
DEMO_ADAPTERS_DIR = PROJECT_ROOT / "demo" / "adapters"
DEMO_MODEL_NAME = "overture-demo"

DEFAULT_CONFIG_FILE = "overture.toml"
ENV_PREFIX = "OVERTURE_"
# Read by `overture chat` and by `--config`, so they are no misspelt settings.
OTHER_ENV_NAMES = frozenset({"OVERTURE_URL", "OVERTURE_API_KEY", "OVERTURE_CONFIG"})

KIB = 1024
MIB = 1024 * KIB
# Measured: 50,000 values are decoded and validated in 20 to 60 ms.
MIN_JSON_VALUES = 50_000

SECRET_SETTINGS = frozenset({"api_keys", "operator_keys"})
# Those that only policies of ours look at.
SCHEDULING_SETTINGS = ("length_predictor", "tenant_weights", "client_priority", "decision_log")
# A repeatable flag reads better in the singular: `--api-key A --api-key B`.
_SINGULAR_FLAGS = {
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "trusted_proxies": "--trusted-proxy",
    "operator_keys": "--operator-key",
    "tenant_weights": "--tenant-weight",
}
# Defaults that depend on the machine, in words.
_DEFAULT_TEXTS = {"data_dir": "~/.local/share/overture", "model": "the demo model"}
_MODULE_AND_NAME = re.compile(r"[\w.]+:[\w.]+")
_TRUE_WORDS = {"1", "true", "yes", "on"}
_FALSE_WORDS = {"0", "false", "no", "off"}

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
if TYPE_CHECKING:
    AdapterPolicy = str
    SchedulingPolicy = str
else:  # mypy wants to read the words
    AdapterPolicy = Literal[tuple(ADAPTER_POLICIES)]
    SchedulingPolicy = Literal[("vllm", *POLICIES)]
LogFormat = Literal["plain", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Positive = Annotated[int, Meta(ge=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class ConfigError(StartupError):
    """A setting is unknown, of the wrong type, or cannot be used. The message is one line, fit to show a user."""


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Where sessions are kept unless told: `$XDG_DATA_HOME/overture`, else `~/.local/share/overture`."""
    xdg = environ.get("XDG_DATA_HOME", "")
    # The XDG base directory specification says that a relative value is to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path("~/.local/share").expanduser()
    return base / "overture"


def _in(group: str, description: str, **constraints: Any) -> Meta:
    """What the help and the error texts say about a setting."""
    return Meta(description=description, extra={"group": group}, **constraints)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of the server, checked. Build it with `load_config`, or directly in tests.

    `served_model_name`, `adapters_dir` and `cpu_threads` are filled in from `model` when they are left empty, `kv_dir` from `data_dir`, so
    readers need no fallback of their own.
    """

    host: Annotated[str, _in("Server", "Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _in("Server", "Port to listen on; 0 takes any free one.", ge=0, le=65535)] = 8000
    data_dir: Annotated[
        Path, _in("Server", "Folder of the session database, made if missing (mode 0700).")
    ] = msgspec.field(default_factory=lambda: default_data_dir(os.environ))
    drain_timeout_s: Annotated[
        float, _in("Server", "After SIGTERM, seconds that running answers are given to finish.", ge=0)
    ] = 30.0
    log_format: Annotated[LogFormat, _in("Server", "Plain lines for people, JSON lines for collectors.")] = (
        "plain"
    )
    log_level: Annotated[LogLevel, _in("Server", "Least severe message that is logged.")] = "info"

    model: Annotated[str, _in("Model", "Model folder, or its name on a model hub.", min_length=1)] = str(
        DEMO_MODEL_DIR
    )
    served_model_name: Annotated[
        str,
        _in("Model", "Name that clients use for the base model; empty: the last part of the model's path."),
    ] = ""
    device: Annotated[
        Device, _in("Model", "Where the engine runs; auto: what the installed vLLM was built for.")
    ] = "auto"
    dtype: Annotated[Dtype, _in("Model", "Type of the weights and activations.")] = "auto"
    max_model_len: Annotated[
        Positive | None,
        _in("Model", "Longest prompt and answer together, in tokens; unset: what the model allows."),
    ] = None
    seed: Annotated[int, _in("Model", "Seed of sampling.", ge=0)] = 0
    chat_template: Annotated[
        Path | None, _in("Model", "Jinja file to use in place of the model's own template.")
    ] = None
    tool_parser: Annotated[
        str | None, _in("Model", "vLLM's parser for tool calls, such as hermes or llama3_json.")
    ] = None
    reasoning_parser: Annotated[
        str, _in("Model", "vLLM's parser for reasoning text, such as qwen3; empty: none.")
    ] = ""

    max_num_seqs: Annotated[int, _in("Engine", "Most requests in one batch.", ge=1)] = 64
    block_size: Annotated[Positive | None, _in("Engine", "Tokens of a KV block; unset: vLLM's choice.")] = (
        None
    )
    kv_cache_gib: Annotated[float, _in("Engine", "KV cache on CPU, in GiB.", gt=0)] = 1.0
    cpu_threads: Annotated[
        Positive | None,
        _in("Engine", "Processor cores that a CPU engine computes on; unset: all (the demo model: 1)."),
    ] = None
    gpu_memory_utilization: Annotated[
        float, _in("Engine", "Share of the GPU's memory to use.", gt=0, le=1)
    ] = 0.9

    kv_host_gib: Annotated[
        float,
        _in(
            "KV tiers",
            "Host memory for KV that leaves the engine's cache, in GiB; 0: none, and none on disk.",
            ge=0,
        ),
    ] = 2.0
    kv_disk_gib: Annotated[
        float,
        _in("KV tiers", "Disk space for KV, in GiB: conversations outlive a restart; 0: none.", ge=0),
    ] = 8.0
    kv_dir: Annotated[
        Path | None, _in("KV tiers", "Folder of the KV on disk; unset: kv in the data folder.")
    ] = None

    draft_prefill: Annotated[
        bool,
        _in(
            "KV tiers",
            "Let users who wish it have their question computed while they type it. Drafts are never stored or logged.",
        ),
    ] = False

    learned_advisories: Annotated[
        bool,
        _in(
            "KV tiers",
            "Learn which agent's request follows which (X-Agent-Name), and warm its session in advance.",
        ),
    ] = True

    scheduling_policy: Annotated[
        SchedulingPolicy,
        _in("Scheduling", "Who starts next: mlq has lanes by size; vllm is its own queue."),
    ] = "mlq"
    max_step_ms: Annotated[
        float,
        _in(
            "Scheduling",
            "How long a step of the engine may take: longer prompts are computed in parts; 0: as long as it takes.",
            ge=0,
        ),
    ] = 500.0
    length_predictor: Annotated[
        str | None,
        _in(
            "Scheduling", "A predictor of answer lengths of your own, as module:Name; ours stands in for it."
        ),
    ] = None
    tenant_weights: Annotated[
        tuple[NonEmpty, ...],
        _in("Scheduling", "The share of a key's owner against others: NAME=2, by the key's name; 1 without."),
    ] = ()
    client_priority: Annotated[
        bool,
        _in("Scheduling", "Let clients put requests before others' (priority below 0), not only behind."),
    ] = False
    decision_log: Annotated[
        Path | None,
        _in(
            "Scheduling",
            "Record who starts and why, for `overture replay`; the last such file becomes FILE.1.",
        ),
    ] = None
    decision_log_mib: Annotated[
        int, _in("Scheduling", "Where that recording ends, in MiB.", ge=1, le=KIB * KIB)
    ] = 64

    adapters_dir: Annotated[
        Path | None, _in("Adapters", "Folder with one LoRA adapter (PEFT format) in each subfolder.")
    ] = None
    max_loras: Annotated[
        int,
        _in(
            "Adapters",
            "Adapters of the largest rank that may be in use at once; on a CPU more of smaller ones, in the same memory.",
            ge=1,
        ),
    ] = 8
    max_lora_rank: Annotated[int, _in("Adapters", "Largest adapter rank.", ge=1)] = 128
    adapter_host_gib: Annotated[
        float, _in("Adapters", "Host memory for adapters that are in use or may be soon, in GiB.", gt=0)
    ] = 1.0
    adapters_in_kv: Annotated[
        bool, _in("Adapters", "Keep unused adapters in KV memory that nobody needs now, too.")
    ] = True
    adapter_policy: Annotated[
        AdapterPolicy,
        _in("Adapters", "Which adapters leave memory first."),
    ] = "expected_gain"
    adapter_prefetch: Annotated[
        bool, _in("Adapters", "Load adapters ahead, by the times between their last requests.")
    ] = False
    cpu_assist: Annotated[
        bool,
        _in("Adapters", "Start requests while their adapter is still on its way to the device."),
    ] = True
    cpu_assist_workers: Annotated[
        int,
        _in("Adapters", "Processes that compute with such adapters meanwhile; 0: the engine does.", ge=0),
    ] = 0
    allow_adapter_loading: Annotated[
        bool, _in("Adapters", "Let clients load and unload adapters while the server runs.")
    ] = False

    api_keys: Annotated[
        tuple[NonEmpty, ...],
        _in(
            "Access", "A key that clients must send. Others on this machine can see flags: prefer a key file."
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None, _in("Access", "File of hashed keys, one a line, from `overture keys new`.")
    ] = None
    operator_keys: Annotated[
        tuple[NonEmpty, ...],
        _in("Access", "As api_keys, and may also read /metrics and change adapters."),
    ] = ()
    cors_origins: Annotated[
        tuple[NonEmpty, ...],
        _in(
            "Access",
            "An origin whose pages may call the API, such as https://chat.example.org; none: CORS is off.",
        ),
    ] = ()
    max_body_bytes: Annotated[int, _in("Access", "Largest HTTP body, in bytes.", ge=KIB)] = 16 * MIB
    max_frame_bytes: Annotated[
        int, _in("Access", "Largest chat socket frame, in bytes.", ge=KIB, le=16 * MIB)
    ] = MIB
    max_sockets: Annotated[int, _in("Access", "Most chat sockets open at once.", ge=1)] = 10_000
    max_connections: Annotated[
        Positive | None,
        _in("Access", "Most connections open at once; unset: what the limit of open files allows."),
    ] = None
    max_connections_per_address: Annotated[
        Positive | None,
        _in("Access", "Most of one address without a key; unset: half of all, at most 1024."),
    ] = None
    trusted_proxies: Annotated[
        tuple[NonEmpty, ...],
        _in(
            "Access",
            "Address or network of a reverse proxy: the limit for one address does not count for it, nor for this machine.",
        ),
    ] = ()
    head_timeout_s: Annotated[
        float, _in("Access", "Seconds in which a request's head must have arrived.", gt=0)
    ] = 10.0
    body_timeout_s: Annotated[
        float, _in("Access", "Seconds that a request's body may stand still.", gt=0)
    ] = 20.0
    keepalive_timeout_s: Annotated[
        float, _in("Access", "Seconds that a connection may be idle between two requests.", gt=0)
    ] = 75.0

    max_json_values: Annotated[
        Positive | None,
        _in("Limits", "Most values in one JSON body; unset: 50,000, or four times what the model reads."),
    ] = None
    max_json_depth: Annotated[int, _in("Limits", "Deepest nesting of one JSON body.", ge=8, le=512)] = 64
    max_messages: Annotated[int, _in("Limits", "Most messages in one call.", ge=1)] = 2048
    max_prompt_chars: Annotated[
        Positive | None,
        _in("Limits", "Longest prompt in characters; unset: 16 for each token that the model reads."),
    ] = None
    max_sequences: Annotated[int, _in("Limits", "Most answers in one call: prompts × n.", ge=1)] = 256
    max_stop_strings: Annotated[int, _in("Limits", "Most stop strings of a request.", ge=1)] = 64
    max_bad_words: Annotated[int, _in("Limits", "Most bad words of a request.", ge=1)] = 256
    max_logit_bias: Annotated[
        int, _in("Limits", "Most entries of logit_bias, and of token ids to stop at.", ge=1)
    ] = 1024
    max_logprobs: Annotated[
        int, _in("Limits", "Most log probabilities in one answer that is not streamed.", ge=1)
    ] = 20_000
    max_grammar_kib: Annotated[
        int, _in("Limits", "Largest grammar or JSON schema of structured output, in KiB.", ge=1)
    ] = 256
    max_grammar_rules: Annotated[int, _in("Limits", "Most rules and alternatives of a grammar.", ge=1)] = 2000
    max_schema_values: Annotated[int, _in("Limits", "Most values in a JSON schema.", ge=1)] = 10_000
    max_choices: Annotated[int, _in("Limits", "Most strings to choose from in structured output.", ge=1)] = (
        1000
    )
    max_regex_chars: Annotated[int, _in("Limits", "Longest regular expression.", ge=1)] = 8192
    max_regex_repeat: Annotated[
        int, _in("Limits", "Largest bound in a regular expression, as in {1,1000}.", ge=1)
    ] = 1000
    grammar_check_s: Annotated[
        float, _in("Limits", "How long checking one grammar may take, in seconds.", gt=0)
    ] = 5.0
    grammar_check_mib: Annotated[
        int, _in("Limits", "How much memory checking one grammar may take, in MiB.", ge=64)
    ] = 512
    max_stored_mib: Annotated[
        int, _in("Limits", "Text of conversations that each key may store, in MiB; 0: no limit.", ge=0)
    ] = 1024

    max_requests_per_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _in(
            "Limits",
            "Requests a second with one key, five seconds' worth at once; unset: 100, without keys 1000.",
        ),
    ] = None
    max_concurrent_requests: Annotated[
        Positive | None,
        _in(
            "Limits",
            "API calls and chat turns of one key under way; unset: 4 × max_num_seqs (64 or more), without keys 10 times as many.",
        ),
    ] = None

    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Setting name -> where its value came from; a setting that is not in it has its default."""

    def __post_init__(self) -> None:
        # force_setattr is msgspec's own way to finish a frozen struct inside __post_init__.
        if not self.served_model_name:
            name = DEMO_MODEL_NAME if self.is_demo_model else self.model.rstrip("/").rsplit("/", 1)[-1]
            msgspec.structs.force_setattr(self, "served_model_name", name)
        if self.adapters_dir is None and self.is_demo_model:
            msgspec.structs.force_setattr(self, "adapters_dir", DEMO_ADAPTERS_DIR)
        if self.kv_dir is None:
            msgspec.structs.force_setattr(self, "kv_dir", self.data_dir / "kv")
        if self.cpu_threads is None and self.is_demo_model:
            # Its matrices are too small to share between cores: docs/decisions/0005.
            msgspec.structs.force_setattr(self, "cpu_threads", 1)

    @property
    def request_limits(self) -> RequestLimits:
        """Those of the limits that the node looks after."""
        return RequestLimits(**{name: getattr(self, name) for name in RequestLimits.__struct_fields__})

    def json_values(self, max_model_len: int) -> int:
        """Most values in one JSON body, for a model that reads so many tokens: a prompt may come as numbers."""
        return self.max_json_values or max(MIN_JSON_VALUES, 4 * max_model_len)

    @property
    def is_demo_model(self) -> bool:
        """Whether `model` is the small model that comes with the project."""
        return Path(self.model).expanduser().resolve() == DEMO_MODEL_DIR

    @property
    def profile_dir(self) -> Path:
        """Where `overture profile` keeps what it measured."""
        return self.data_dir / "profiles"

    @property
    def has_api_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_keys or self.operator_keys) or self.api_key_file is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return _is_loopback(self.host)

    def warnings(self) -> list[str]:
        """What the operator should know before the server starts, one sentence each."""
        found = []
        if not self.is_loopback and not self.has_api_keys:
            found.append(
                f"Anyone who reaches {self.host}:{self.port} can use this server and read its sessions: no API key is set. "
                "Make one with `overture keys new`, or listen on 127.0.0.1."
            )
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
        """Make `data_dir`, readable by its owner only, if it is missing; take others' rights from one that is there. Raises ConfigError if
        it cannot be written."""
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data_dir: cannot make {self.data_dir}: {error.strerror}") from error
        if not os.access(self.data_dir, os.W_OK | os.X_OK):
            raise ConfigError(f"data_dir: {self.data_dir} is not writable by this user")
        tighten(self.data_dir, self.kv_dir, (self.adapters_dir, Path(self.model)))
        return self.data_dir

    def describe(self) -> str:
        """A table of all settings: name, value (secrets masked) and source."""
        rows = [(setting.name, _shown(setting.name, getattr(self, setting.name))) for setting in SETTINGS]
        name_width = max(len(name) for name, _ in rows)
        value_width = min(48, max(len(value) for _, value in rows))
        return "\n".join(
            f"{name:<{name_width}}  {value:<{value_width}}  {self.sources.get(name, 'default')}"
            for name, value in rows
        )

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{setting.name}={_shown(setting.name, getattr(self, setting.name))}" for setting in SETTINGS
        )
        return f"Config({fields})"


class Setting(NamedTuple):
    """One field of `Config` as the help, the environment and the command line know it."""

    name: str
    group: str
    description: str
    default: str
    type: msgspec.inspect.Type

    @property
    def flag(self) -> str:
        """`--max-num-seqs`; in the singular for settings that take several values."""
        return _SINGULAR_FLAGS.get(self.name, "--" + self.name.replace("_", "-"))

    @property
    def env(self) -> str:
        """`OVERTURE_MAX_NUM_SEQS`."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return isinstance(self.type, msgspec.inspect.BoolType)

    @property
    def is_list(self) -> bool:
        return isinstance(self.type, msgspec.inspect.VarTupleType)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, or () if the setting takes other values."""
        return (
            tuple(str(value) for value in self.type.values)
            if isinstance(self.type, msgspec.inspect.LiteralType)
            else ()
        )

    @property
    def expected(self) -> str:
        """What a value must be, for error texts: "an integer from 0 to 65535"."""
        return _expected(self.type)


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    cwd: Path | None = None,
) -> Config:
    """The settings from file, environment and flags, later sources over earlier ones.

    `flags` maps setting names to strings, bools, or sequences of strings; None and () mean "not given".
    `config_file` must exist if given (`OVERTURE_CONFIG` stands in for it); otherwise `overture.toml` in `cwd` is
    read if it is there. Relative paths in the file count from the file's folder, others from `cwd`.
    Raises ConfigError, which names the source, the setting and what was expected.
    """
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    values: dict[str, Any] = {"data_dir": default_data_dir(environ)}
    sources: dict[str, str] = {}
    for layer in (
        _from_file(config_file, environ, cwd),
        _from_environ(environ, cwd),
        _from_flags(flags or {}, cwd),
    ):
        for name, (value, source) in layer.items():
            values[name] = value
            sources[name] = source
    config = Config(**values, sources=sources)
    _check(config)
    return config


def _check(config: Config) -> None:
    """What no single setting shows: files that are named but missing, and settings that do not go together."""
    for name in ("chat_template", "api_key_file"):
        path = getattr(config, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"{name}: there is no file {path} ({config.sources[name]})")
    if (
        "adapters_dir" in config.sources
        and config.adapters_dir is not None
        and not config.adapters_dir.is_dir()
    ):
        raise ConfigError(
            f"adapters_dir: there is no folder {config.adapters_dir} ({config.sources['adapters_dir']})"
        )
    if (
        config.model.startswith((".", "/", "~"))
        and not config.is_demo_model
        and not Path(config.model).is_dir()
    ):
        raise ConfigError(f"model: there is no folder {config.model} ({config.sources['model']})")
    try:
        parse_weights(config.tenant_weights)
    except ValueError as error:
        raise ConfigError(f"tenant_weights: {error} ({config.sources['tenant_weights']})") from error
    for proxy in config.trusted_proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError as error:
            raise ConfigError(f"trusted_proxies: {error} ({config.sources['trusted_proxies']})") from error
    if config.decision_log is not None and not config.decision_log.parent.is_dir():
        raise ConfigError(
            f"decision_log: there is no folder {config.decision_log.parent} ({config.sources['decision_log']})"
        )
    if config.length_predictor is not None and not _MODULE_AND_NAME.fullmatch(config.length_predictor):
        raise ConfigError(
            f"length_predictor: expected module:Name, got {config.length_predictor!r} ({config.sources['length_predictor']})"
        )


_Layer = dict[str, tuple[Any, str]]


def _from_file(config_file: str | os.PathLike[str] | None, environ: Mapping[str, str], cwd: Path) -> _Layer:
    given = config_file or environ.get("OVERTURE_CONFIG")
    path = cwd / (Path(given).expanduser() if given else DEFAULT_CONFIG_FILE)
    if not given and not path.exists():
        return {}
    layer: _Layer = {}
    for name, raw in _read_toml(path).items():
        if name not in _BY_NAME:
            raise ConfigError(f"{path}: unknown setting {name!r}{_did_you_mean(name, _BY_NAME)}")
        setting = _BY_NAME[name]
        layer[name] = (_convert(setting, raw, f"{path}: {name}", path.parent, strict=True), str(path))
    return layer


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _from_environ(environ: Mapping[str, str], cwd: Path) -> _Layer:
    by_env = {setting.env: setting for setting in SETTINGS}
    layer: _Layer = {}
    for key, raw in environ.items():
        if not key.startswith(ENV_PREFIX) or not raw or key in OTHER_ENV_NAMES:
            continue
        setting = by_env.get(key)
        if setting is None:
            # Not an error: such a variable may belong to another program.
            logger.warning("%s is no setting of this server, ignored%s", key, _did_you_mean(key, by_env))
            continue
        value: Any = [part.strip() for part in raw.split(",")] if setting.is_list else raw
        layer[setting.name] = (
            _convert(setting, value, f"environment: {key}", cwd, strict=False),
            f"env {key}",
        )
    return layer


def _from_flags(flags: Mapping[str, Any], cwd: Path) -> _Layer:
    layer: _Layer = {}
    for name, raw in flags.items():
        setting = _BY_NAME.get(name)
        if setting is None:
            raise ConfigError(f"unknown flag for {name!r}{_did_you_mean(name, _BY_NAME)}")
        if raw is None or raw == ():
            continue
        layer[name] = (_convert(setting, raw, setting.flag, cwd, strict=False), f"flag {setting.flag}")
    return layer


def _convert(setting: Setting, raw: Any, where: str, base: Path, *, strict: bool) -> Any:
    """`raw` as the type of the setting. `strict`: "8" is no number (a file has types); `base`: folder of relative paths."""
    if not strict and setting.is_bool and isinstance(raw, str):
        raw = _to_bool(raw)
    if setting.name == "tenant_weights" and isinstance(raw, dict):  # a table: ada = 2
        raw = [f"{name}={weight}" for name, weight in raw.items()]
    try:
        value = msgspec.convert(raw, _FIELD_TYPES[setting.name], strict=strict, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        got = "" if setting.name in SECRET_SETTINGS else f", got {raw!r}"
        raise ConfigError(f"{where}: expected {setting.expected}{got}") from error
    if isinstance(value, Path):
        return base / value
    if setting.name == "model":
        return _find_model(value, base)
    return value


def _to_bool(word: str) -> bool | str:
    lowered = word.strip().lower()
    if lowered in _TRUE_WORDS:
        return True
    return False if lowered in _FALSE_WORDS else word


def _decode_path(kind: type, value: Any) -> Any:
    """msgspec's hook for types that it does not know. A `~` in a path is the user's home."""
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("not a path")


def _find_model(model: str, base: Path) -> str:
    """The folder's full path if there is such a folder, else `model` as it is: the name of a model on a hub."""
    folder = base / Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _did_you_mean(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _shown(name: str, value: Any) -> str:
    if name in SECRET_SETTINGS:
        return f"{len(value)} set, hidden" if value else "none"
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _expected(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.UnionType(types=types):
            return _expected(next(part for part in types if not isinstance(part, msgspec.inspect.NoneType)))
        case msgspec.inspect.VarTupleType():
            return "a list of non-empty strings"
        case msgspec.inspect.IntType():
            return "an integer" + _range(kind)
        case msgspec.inspect.FloatType():
            return "a number" + _range(kind)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.StrType(min_length=1):
            return "a non-empty string"
        case msgspec.inspect.CustomType():
            return "a path"
    return "a string"


def _range(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    low = kind.ge if kind.ge is not None else kind.gt
    above = "more than" if kind.gt is not None else "at least"
    if low is None:
        return ""
    if kind.le is None:
        return f", {above} {low}"
    return f" from {low} to {kind.le}" if kind.gt is None else f", more than {low} and at most {kind.le}"


def _settings() -> tuple[Setting, ...]:
    info = msgspec.inspect.type_info(Config)
    assert isinstance(info, msgspec.inspect.StructType)
    return tuple(_setting(field) for field in info.fields if isinstance(field.type, msgspec.inspect.Metadata))


def _setting(field: msgspec.inspect.Field) -> Setting:
    meta = field.type
    assert isinstance(meta, msgspec.inspect.Metadata)
    schema, extra = meta.extra_json_schema or {}, meta.extra or {}
    default = _DEFAULT_TEXTS.get(field.name) or _shown(field.name, field.default)
    return Setting(field.name, extra["group"], schema["description"], default, meta.type)


SETTINGS: Sequence[Setting] = _settings()
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}
