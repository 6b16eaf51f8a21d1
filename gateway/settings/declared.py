"""The form of settings in the help, the environment and the command line: all of it follows from a struct's fields."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

ENV_PREFIX = "OVERTURE_"
# An address of an MCP server may hold a secret.
SECRET_SETTINGS = frozenset({"api_keys", "operator_keys", "mcp_servers"})
# The one engine argument that is a secret.
_HUB_TOKEN = re.compile(r"^(\W*hf[-_]token\W*?)=.*", re.DOTALL)
# In the order of the help.
GROUPS = (
    "Server",
    "Cluster",
    "Model",
    "Tools",
    "Embeddings",
    "Engine",
    "KV tiers",
    "Scheduling",
    "Adapters",
    "Access",
    "Limits",
)
# A repeatable flag reads better in the singular: `--api-key A --api-key B`.
_SINGULAR_FLAGS = {
    "allow_image_hosts": "--allow-image-host",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "trusted_proxies": "--trusted-proxy",
    "embedding_engine_args": "--embedding-engine-arg",
    "engine_args": "--engine-arg",
    "rerank_engine_args": "--rerank-engine-arg",
    "lora_modules": "--lora-module",
    "mcp_servers": "--mcp-server",
    "operator_keys": "--operator-key",
    "served_model_aliases": "--served-model-alias",
    "tenant_weights": "--tenant-weight",
}
# Defaults that depend on the machine, in words.
_DEFAULT_TEXTS = {"data_dir": "~/.local/share/overture", "model": "the demo model"}


class Setting(NamedTuple):
    """One field of a struct of settings, with its names and values in the help, the environment and the command line."""

    name: str
    group: str
    description: str
    default: str
    type: msgspec.inspect.Type

    @property
    def flag(self) -> str:
        """The flag, such as `--max-num-seqs`; in the singular for settings that take several values."""
        return _SINGULAR_FLAGS.get(self.name, "--" + self.name.replace("_", "-"))

    @property
    def env(self) -> str:
        """The variable, such as `OVERTURE_MAX_NUM_SEQS`."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        """Whether the setting is on or off."""
        return isinstance(self.type, msgspec.inspect.BoolType)

    @property
    def is_list(self) -> bool:
        """Whether the setting takes several values."""
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
        """The expected value, for error texts: "an integer from 0 to 65535"."""
        return expected(self.type)


def settings_of(struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Return the fields of a struct that are settings (`engine_bridge.settings.engine_config.setting`), in the order of the help."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    found = [_setting(field) for field in info.fields if isinstance(field.type, msgspec.inspect.Metadata)]
    return tuple(sorted(found, key=lambda setting: GROUPS.index(setting.group)))


def _setting(field: msgspec.inspect.Field) -> Setting:
    meta = field.type
    assert isinstance(meta, msgspec.inspect.Metadata)
    schema, extra = meta.extra_json_schema or {}, meta.extra or {}
    default = _DEFAULT_TEXTS.get(field.name) or shown(field.name, field.default)
    return Setting(field.name, extra["group"], schema["description"], default, meta.type)


def shown(name: str, value: Any) -> str:
    """Return a value as tables show it; secrets are counted, not shown."""
    if name in SECRET_SETTINGS:
        return f"{len(value)} set, hidden" if value else "none"
    if value is None:
        return "unset"
    if name.endswith("engine_args"):
        value = tuple(_HUB_TOKEN.sub(r"\1=hidden", pair) for pair in value)
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def expected(kind: msgspec.inspect.Type) -> str:
    """Return the values that a type allows, for error texts."""
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return ("one of " if len(values) > 1 else "") + ", ".join(str(value) for value in values)
        case msgspec.inspect.UnionType(types=types):
            return ", or ".join(
                expected(each) for each in types if not isinstance(each, msgspec.inspect.NoneType)
            )
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
