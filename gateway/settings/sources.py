"""The sources of each setting's value.

Later sources win: built-in defaults < config file (TOML) < environment (`OVERTURE_PORT` ...) < flags (`--port` ...). Every setting has one name;
the others follow from it: `max_num_seqs` is `max_num_seqs = 64` in the file, `OVERTURE_MAX_NUM_SEQS` in the environment and `--max-num-seqs` on
the command line.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine_bridge.adapters.errors import quoted
from engine_bridge.adapters.names import problem_as_text
from engine_bridge.settings import engine_arguments
from engine_bridge.settings.engine_config import EngineSettings
from engine_bridge.settings.lora_modules import is_of_hub, parse_lora_modules
from gateway.settings.config import SETTINGS, Config, ConfigError, default_data_dir
from gateway.settings.declared import ENV_PREFIX, SECRET_SETTINGS, Setting
from gateway.settings.priorities import parse_weights
from gateway.tools.addresses import parse_mcp_servers

logger = logging.getLogger(__name__)

DEFAULT_CONFIG_FILE = "overture.toml"
# Read by `overture chat` and by `--config`, so they are no misspelt settings.
OTHER_ENV_NAMES = frozenset({"OVERTURE_URL", "OVERTURE_API_KEY", "OVERTURE_CONFIG"})
# The key of `vllm serve`, where none is given by a setting: whoever comes from there has a server that is closed, and it stays closed.
_VLLM_KEY = "VLLM_API_KEY"
# By this `vllm serve` lets clients load adapters, where it is 1 or true.
_VLLM_LOADING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# What scripts and YAML files write where a value is missing: as a key, anybody could guess it.
_NO_KEY = frozenset(("None", "null", "~"))
_NAMES_OF_KEYS = ("api_keys", "operator_keys", "api_key_file")
_OF_TLS = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
TEMPLATES = ("chat_template", "rerank_chat_template")
_MODULE_AND_NAME = re.compile(r"[\w.]+:[\w.]+")
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")
_HEADER = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Headers that identify the sender in another way, or that any sender can set freely.
_OTHER_HEADERS = frozenset({"authorization", "cookie", "host", "origin", "x-api-key", "user-agent"})
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_TRUE_WORDS = {"1", "true", "yes", "on"}
_FALSE_WORDS = {"0", "false", "no", "off"}
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(Config)}


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    config_file: str | os.PathLike[str] | None = None,
    cwd: Path | None = None,
    needs_key_file: bool = True,
) -> Config:
    """Load the settings from file, environment and flags; later sources win.

    Args:
        flags: maps setting names to strings, bools, or sequences of strings; None and () mean "not given".
        environ: the environment's variables.
        config_file: must exist if given (`OVERTURE_CONFIG` stands in for it); otherwise `overture.toml` in `cwd` is read if it exists. Relative
            paths in the file count from the file's folder, others from `cwd`.
        cwd: the folder in which the command runs.
        needs_key_file: whether `api_key_file` must be there; not for commands that are about to make it.

    Raises:
        ConfigError: names the source, the setting and the expected value.
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
    if (key := environ.get(_VLLM_KEY)) and not any(values.get(name) for name in _NAMES_OF_KEYS):
        values["api_keys"], sources["api_keys"] = (key,), f"env {_VLLM_KEY}"
    if _to_bool(environ.get(_VLLM_LOADING, "")) is True and "allow_adapter_loading" not in values:
        values["allow_adapter_loading"], sources["allow_adapter_loading"] = True, f"env {_VLLM_LOADING}"
    if values.get("scheduling_policy") == "priority" and "client_priority" not in values:
        # Who asks for it, as `vllm serve` has it, wishes that clients say who goes first.
        values["client_priority"], sources["client_priority"] = True, sources["scheduling_policy"]
    config = Config(**values, sources=sources)
    _check(config)
    if needs_key_file:
        _check_key_file(config)
    return config


def _check(config: Config) -> None:
    """Check what involves more than one setting or a file: missing files, and settings that exclude each other."""
    _check_cluster(config)
    _check_engine(config)
    for name in ("api_keys", "operator_keys"):
        if _NO_KEY & set(getattr(config, name)):
            raise ConfigError(
                f"{name}: a key is missing: there is only a word for nothing ({config.sources[name]})"
            )
    others: dict[str, Sequence[str]] = {"chat": config.model_names}
    _check_beside(config, "embedding_model", others)
    _check_beside(config, "rerank_model", others | {"embedding": [config.embedding_model_name]})
    for name in (
        "cluster_cert",
        "cluster_key",
        "oidc_client_secret_file",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
    ):
        _check_is_file(config, name)
    for name in TEMPLATES:
        template = getattr(config, name)
        if template is not None and not is_template(template) and not Path(template).is_file():
            raise ConfigError(f"{name}: there is no file {template} ({config.sources[name]})")
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
        is_gguf = config.model.lower().endswith(".gguf")
        why = (
            "GGUF files are not read: give a folder with config.json and safetensors"
            if is_gguf
            else "there is no such folder"
        )
        raise ConfigError(f"model: {config.model}: {why} ({config.sources['model']})")
    try:
        parse_weights(config.tenant_weights)
    except ValueError as error:
        raise ConfigError(f"tenant_weights: {error} ({config.sources['tenant_weights']})") from error
    for proxy in config.trusted_proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError as error:
            raise ConfigError(f"trusted_proxies: {error} ({config.sources['trusted_proxies']})") from error
    _check_sign_in(config)
    if config.length_predictor is not None and not _MODULE_AND_NAME.fullmatch(config.length_predictor):
        raise ConfigError(
            f"length_predictor: expected module:Name, got {config.length_predictor!r} ({config.sources['length_predictor']})"
        )


def _check_sign_in(config: Config) -> None:
    """Check the settings by which others sign people in."""
    header = config.trusted_user_header
    if header and not _HEADER.fullmatch(header):
        raise ConfigError(
            f"trusted_user_header: expected the name of a header, got {header!r} ({config.sources['trusted_user_header']})"
        )
    if header.lower() in _OTHER_HEADERS:
        raise ConfigError(
            f"trusted_user_header: {header} says something else: have the proxy send another header"
        )
    issuer = config.oidc_issuer
    if bool(issuer) is not bool(config.oidc_client_id):
        raise ConfigError("oidc_issuer and oidc_client_id go together: give both, or neither")
    if issuer and not is_tls_or_local(issuer):
        raise ConfigError(
            f"oidc_issuer: expected an https address, got {issuer!r} ({config.sources['oidc_issuer']})"
        )
    if config.add_trusted_users and not header and not issuer:
        raise ConfigError(
            "add_trusted_users: nobody names people: set trusted_user_header or oidc_issuer, too"
        )


def _check_key_file(config: Config) -> None:
    """Check that the key file is there, where one is named, and where people are signed in by others."""
    _check_is_file(config, "api_key_file", "`overture users add NAME --operator --key-file FILE` makes it")
    for name in ("trusted_user_header", "oidc_issuer"):
        if getattr(config, name) and config.api_key_file is None:
            raise ConfigError(
                f"{name}: people stand in a key file, so name one with api_key_file; "
                "`overture users add NAME --operator --key-file FILE` makes it"
            )


def template_of(config: Config, name: str) -> str | None:
    """Return the template that a setting gives, itself or as a file; None where it is unset. Raises ConfigError for a file that cannot be read."""
    given: str | None = getattr(config, name)
    try:
        return given if given is None or is_template(given) else Path(given).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot read {given}: {error}") from error


def is_template(text: str) -> bool:
    """Return whether a value of a setting for a template is the template itself, not the path of a file that holds one."""
    return "{" in text


def _check_is_file(config: Config, name: str, remedy: str = "") -> None:
    path = getattr(config, name)
    if path is not None and not path.is_file():
        what = f"{name}: there is no file {path} ({config.sources[name]})"
        raise ConfigError(f"{what}; {remedy}" if remedy else what)


def is_tls_or_local(url: str) -> bool:
    """Return whether data sent to an address stays between the two ends: by TLS, or on this machine."""
    try:
        split = urlsplit(url)
        host = split.hostname or ""
    except ValueError:
        return False
    return bool(host) and (
        split.scheme == "https" or (split.scheme == "http" and host in ("127.0.0.1", "::1", "localhost"))
    )


def _check_engine(config: Config) -> None:
    """Check the engine's arguments as far as that is possible without the engine."""
    flags = {
        setting.name: setting.flag for setting in SETTINGS if setting.name in EngineSettings.__struct_fields__
    }
    checks: dict[str, Callable[[], object]] = {
        "engine_args": lambda: engine_arguments.parse(config.engine_args, flags),
        "embedding_engine_args": lambda: engine_arguments.parse_beside(config.embedding_engine_args),
        "rerank_engine_args": lambda: engine_arguments.parse_beside(config.rerank_engine_args),
        "served_model_name": lambda: _check_names([config.served_model_name]),
        "served_model_aliases": lambda: _check_names(config.served_model_aliases),
        "lora_modules": lambda: _check_folders(config.lora_modules),
        "mcp_servers": lambda: parse_mcp_servers(config.mcp_servers),
        "speculative_config": lambda: _object(config.speculative_config),
        "default_chat_template_kwargs": lambda: _check_template_arguments(
            _object(config.default_chat_template_kwargs)
        ),
    }
    for name, check in checks.items():
        try:
            check()
        except ValueError as error:
            source = config.sources.get(name, "default")
            raise ConfigError(f"{name}: {error} ({source})") from error
    if config.adapters == "off" and config.lora_modules:
        raise ConfigError("lora_modules: an adapter is named, and adapters is off: take one of them away")
    if config.ssl_certfile is None and any(getattr(config, name) for name in _OF_TLS):
        raise ConfigError(f"{', '.join(_OF_TLS)}: they are for HTTPS, which needs ssl_certfile, too")
    if config.ssl_cert_reqs == 2 and config.ssl_ca_certs is None:
        raise ConfigError(
            "ssl_cert_reqs: clients' certificates are checked by those in ssl_ca_certs: give that, too"
        )
    if config.uds is not None and config.ssl_certfile is not None:
        raise ConfigError("uds: a Unix socket has no TLS: take ssl_certfile and ssl_keyfile away")


def _check_names(names: Iterable[str]) -> None:
    """Check the served model's names, which are used like adapters' names."""
    for name in names:
        if problem := problem_as_text(name):
            raise ValueError(f"no model may be called {quoted(name)}: the name {problem}")


def _check_beside(config: Config, setting_name: str, others: Mapping[str, Sequence[str]]) -> None:
    """Check the model of this setting, which is served beside models of other names."""
    model, name = getattr(config, setting_name), getattr(config, f"{setting_name}_name")
    if model is None:
        return
    source = config.sources.get(setting_name, "default")
    if model.startswith((".", "/", "~")) and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"{setting_name}: there is no model in {model}: no config.json ({source})")
    try:
        _check_names([name])
    except ValueError as error:
        raise ConfigError(f"{setting_name}_name: {error}") from error
    for whose, names in others.items():
        if name in names:
            raise ConfigError(
                f"{setting_name}_name: the {whose} model is called {name}, too: name one of them otherwise"
            )


def _check_folders(lora_modules: Iterable[str]) -> None:
    for name, path in parse_lora_modules(lora_modules):
        if not is_of_hub(path) and not Path(path).is_dir():
            raise ValueError(f"there is no folder {path} for the adapter {name}")


def _object(text: str | None) -> dict[str, Any]:
    """Return the JSON object that a text holds, {} for None. Raises ValueError for anything else."""
    try:
        found = json.loads(text) if text is not None else {}
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return found


def _check_template_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what vLLM sets itself for each conversation. Raises ValueError."""
    if names := sorted({"chat_template", "tokenize"} & given.keys()):
        raise ValueError(f"{names[0]} is no argument that a chat template gets: see --chat-template")


def _check_cluster(config: Config) -> None:
    if config.ray_address is not None and not _HOST_AND_PORT.fullmatch(config.ray_address):
        raise ConfigError(
            f"ray_address: expected HOST:PORT, got {config.ray_address!r} ({config.sources['ray_address']})"
        )
    if config.node_name and not _NODE_NAME.fullmatch(config.node_name):
        raise ConfigError(
            f"node_name: expected up to 63 letters, digits, dots and dashes, got {config.node_name!r} ({config.sources['node_name']})"
        )
    try:
        is_loopback = ipaddress.ip_address(config.cluster_host).is_loopback
        is_any = ipaddress.ip_address(config.cluster_host).is_unspecified
    except ValueError as error:
        raise ConfigError(f"cluster_host: {error} ({config.sources['cluster_host']})") from error
    if is_any:
        raise ConfigError("cluster_host: name one address of this machine, at which the others reach it")
    if (config.cluster_cert is None) is not (config.cluster_key is None):
        raise ConfigError("cluster_cert and cluster_key go together: give both, or neither")
    if not is_loopback and config.cluster_cert is None:
        raise ConfigError(
            f"cluster_host: nodes on {config.cluster_host} need TLS: give --cluster-cert and --cluster-key, "
            "the same on all machines (docs/operations/nodes.md)"
        )
    if config.nodes == 0 and config.ray_address is None and is_loopback:
        raise ConfigError("nodes: 0 is for a cluster that others join: give --ray-address or --cluster-host")


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
    """Convert `raw` to the type of the setting. `strict`: "8" is no number (a file has types); `base`: folder of relative paths."""
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
    if setting.name in ("model", "embedding_model", "rerank_model"):
        return _find_model(value, base)
    if setting.name in TEMPLATES and value is not None and not is_template(value):
        return str(base / Path(value).expanduser())
    return value


def _to_bool(word: str) -> bool | str:
    lowered = word.strip().lower()
    if lowered in _TRUE_WORDS:
        return True
    return False if lowered in _FALSE_WORDS else word


def _decode_path(kind: type, value: Any) -> Any:
    """Convert a path for msgspec, which does not know the type. A `~` in it is the user's home."""
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("not a path")


def _find_model(model: str, base: Path) -> str:
    """Return the full path of the model's folder, or `model` unchanged if there is no such folder: a name on a hub."""
    folder = base / Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _did_you_mean(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
