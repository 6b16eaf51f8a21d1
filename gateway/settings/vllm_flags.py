"""The command line of `vllm serve`, translated into ours as far as this server does the same.

A table says for each flag of vLLM what happens to it; `docs/from-vllm.md` is this table with remarks, and a test compares the two. Flags of the
same name here are not in the table. Each engine argument is taken by vLLM's name, as `--engine-arg`; those that change nothing are in
`engine_bridge/settings/engine_arguments.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from engine_bridge.settings.engine_config import GIB
from overture_client.command_line import is_flag, lacks_value

# vLLM's -> ours, with one value.
RENAMED: Mapping[str, str] = {
    "--tool-call-parser": "--tool-parser",
    "--uvicorn-log-level": "--log-level",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--kv-offloading-size": "--kv-host-gib",
    "--shutdown-timeout": "--drain-timeout-s",
    "--kv-cache-memory-bytes": "--kv-cache-gib",
    "-q": "--quantization",
}
# vLLM's -> ours, where vLLM takes several values behind one flag, or a JSON list. Ours is repeated.
SEVERAL: Mapping[str, str] = {
    "--lora-modules": "--lora-module",
    "--allowed-origins": "--cors-origin",
    "--allowed-media-domains": "--allow-image-host",
}
# A flag that has one value here -> ours for the further values that vLLM takes behind it.
FURTHER: Mapping[str, str] = {"--served-model-name": "--served-model-alias", "--api-key": "--api-key"}
# vLLM's -> ours, which has the number of pictures alone: neither audio nor video is taken.
LIMITS: Mapping[str, str] = {"--limit-mm-per-prompt": "--max-images"}
# A switch of vLLM's -> our flag and its value.
INSTEAD: Mapping[str, str] = {"--no-enable-lora": "--adapters=off"}
# Flags for behaviour that this server always has. They are dropped.
ALWAYS: Mapping[str, str] = {
    "--enable-lora": "adapters are served wherever the model can have them: see --adapters",
    "--enable-auto-tool-choice": "tools are always offered to the model",
    "--enable-chunked-prefill": "long prompts are always cut into parts",
    "--enable-prompt-tokens-details": "usage always says how many tokens were cached",
    "--enable-server-load-tracking": "/load always answers",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info always answers",
    "--disable-log-requests": "prompts are never logged",
    "--no-enable-log-requests": "prompts are never logged",
    "--disable-uvicorn-access-log": "there is no access log",
    "--enable-request-id-headers": "every reply has an X-Request-Id",
    "--disable-log-stats": "the log has no periodic figures; /metrics has them",
    "--log-error-stack": "the log says where an error of the server's was raised",
    "--enable-offline-docs": "/docs loads nothing from other servers",
    "--max-log-len": "prompts are never logged",
    "--disable-access-log-for-endpoints": "there is no access log",
    "--enable-ssl-refresh": "a renewed certificate is taken over within seconds",
    "--allowed-methods": "an allowed origin may use all methods",
    "--allowed-headers": "an allowed origin may send any header",
}
# Flags whose numbers may be written as 32k (thousands) or 32K (times 1,024).
_LARGE_NUMBERS = frozenset(("--max-model-len", "--max-num-batched-tokens"))
_IN_BYTES = "--kv-cache-memory-bytes"
_LARGE_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_UNITS = {
    letter: base**power
    for letters, base in (("kmgt", 1000), ("KMGT", 1024))
    for power, letter in enumerate(letters, 1)
}
# vLLM's other words for values of flags that have the same name here.
_SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--log-level": {"critical": "error", "trace": "debug"}
    | {level.upper(): level for level in ("debug", "info", "warning", "error")}
    | {"CRITICAL": "error", "NOTSET": "debug"},
    "--max-model-len": {"-1": "auto"},
}
# Flags of vLLM's server, not of its engine, without which this one serves. It says so, with the reason.
LEFT_OUT: Mapping[str, str] = {
    "--no-enable-chunked-prefill": "long prompts are cut into parts by how long a step takes: see --max-step-ms",
    "--enable-log-requests": "prompts are never logged here. GET /v1/engine/state shows what runs and waits, by X-Request-Id",
    "--api-server-count": "one process serves all connections here; for several engines give --nodes",
    "--tool-server": "tools of API calls are run by clients; for the page see --mcp-server",
    "--allow-credentials": "no cookies are used; keys are sent as headers, which an allowed origin may send",
    "--trust-request-chat-template": "templates are the operator's to give: see --chat-template",
    "--enable-log-outputs": "answers are never logged",
    "--enable-log-deltas": "answers are never logged",
    "--sse-keep-alive-interval": "a stream in which nothing happens gets a comment every 15 s",
    "--enable-per-request-metrics": "chat turns have their timings in the `done` frame (docs/protocol.md)",
    "--disable-fastapi-docs": "/docs and /openapi.json are always served; they say what is in the sources",
    "--h11-max-incomplete-event-size": "what a request may hold is set by the group Limits of the help",
    "--h11-max-header-count": "what a request may hold is set by the group Limits of the help",
    "--response-role": "answers have the role that the API gives them, assistant",
    "--trust-request-mm-kwargs": "how pictures are read is the operator's to set: see --engine-arg mm_processor_kwargs",
    "--exclude-tools-when-tool-choice-none": "tools stay in the prompt, where they were cached; a call that leaves out `tools` has none",
    "--tool-strict-level": "how calls are held to schemas follows the tool_choice of the request",
    "--anthropic-disabled-thinking-effort": "it is found out from the chat template",
    "--enable-scale-out": "prompts are rendered where they are answered; for several engines give --nodes",
    "--enable-flash-late-interaction": "the model generates text; one for embeddings or scores comes beside it: --embedding-model, --rerank-model",
    "--cohere-is-reasoning-model": "Cohere's API is not served",
    "--cohere-format": "Cohere's API is not served",
    "--fingerprint-mode": "system_fingerprint has the version and a digest of the settings",
    "--fingerprint-value": "system_fingerprint has the version and a digest of the settings",
} | dict.fromkeys(
    (
        "--data-parallel-supervisor-port",
        "--dp-supervisor-probe-interval-s",
        "--dp-supervisor-probe-timeout-s",
        "--dp-supervisor-probe-failure-threshold",
    ),
    "one process serves all connections here; for several engines give --nodes",
)
# Those that ask for another kind of server, or for a door that would stand open.
REFUSED: Mapping[str, str] = {
    "--headless": "a node of a cluster is started with `overture node`",
    "--grpc": "the server speaks HTTP and websockets",
    "--grpc-port": "the server speaks HTTP and websockets",
    "--tokens-only": "the server renders conversations itself, and splits them into tokens",
    "--middleware": "the server is no ASGI application that middleware could wrap",
}
# Those of `ALWAYS`, `LEFT_OUT` and `REFUSED` that have a value behind them; the others are switches.
_WITH_VALUE = frozenset(
    """
    --max-log-len --disable-access-log-for-endpoints --allowed-methods --allowed-headers
    --api-server-count --tool-server --sse-keep-alive-interval --h11-max-incomplete-event-size --h11-max-header-count --response-role
    --tool-strict-level --anthropic-disabled-thinking-effort --cohere-format --fingerprint-mode --fingerprint-value
    --data-parallel-supervisor-port --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold
    --grpc-port --middleware
    """.split()
)
SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-asc": "--api-server-count",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dc": "--diffusion-config",
    "-ep": "--enable-expert-parallel",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
}
# vLLM's -O3, -O=3 or -O 3. -> its flag with a name.
_LEVEL = re.compile(r"-O(?:=?(\w+))?")
# A value behind a flag of one letter: -qfp8, -n2.
_JOINED = re.compile(r"^(-[nqr])(?=[^=-])(.+)$", re.DOTALL)
# One field of a flag that has a JSON object, such as --compilation-config.mode=3. -> the flag, the field, the value behind "=".
_FIELD = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=]+)(?:=(.*))?", re.DOTALL)
# Values with which a flag of `LEFT_OUT` or `REFUSED` says what is so anyway.
_SO_ANYWAY: Mapping[str, tuple[str, ...]] = {
    "--api-server-count": ("1",),
    "--response-role": ("assistant",),
    "--tool-strict-level": ("auto",),
    "--anthropic-disabled-thinking-effort": ("auto",),
    "--fingerprint-mode": ("full",),
    "--sse-keep-alive-interval": ("0",),
}
# Our flags whose value vLLM takes for none where it is empty or "None", as scripts and YAML files write it. Not --api-key: its door would be open.
_MAY_BE_NONE = frozenset(
    """
    --host --uds --root-path --ssl-certfile --ssl-keyfile --ssl-ca-certs --ssl-ciphers --otlp-endpoint
    --chat-template --tool-parser --reasoning-parser --tool-parser-plugin --reasoning-parser-plugin --default-chat-template-kwargs
    --served-model-name --quantization --revision --download-dir --speculative-config
    --max-model-len --max-num-seqs --max-num-batched-tokens --block-size --kv-cache-gib --kv-host-gib
    """.split()
)
_NONE = ("", "None")
# Of vLLM's flags in `SEVERAL`, the one behind which a single word stands: a JSON list.
_ONE_WORD = "--allowed-origins"


_WITHOUT = frozenset((*ALWAYS, *LEFT_OUT, *REFUSED))
_IN_TABLES = frozenset((*RENAMED, *SEVERAL, *FURTHER, *LIMITS, *INSTEAD, *_WITHOUT))
# Of two flags, 0 to 1: how alike they are at least when one is taken for the other, mistyped. Chosen: a letter or a word's end; no other word.
_LIKENESS = 0.8


class FlagRefusal(ValueError):
    """A flag of vLLM that has no meaning here. The text names the flag and the reason."""


class _Flag(NamedTuple):
    """One flag of a command line. value: the text behind "=", None if there is none."""

    name: str
    value: str | None

    @classmethod
    def of(cls, word: str) -> _Flag:
        """Parse a word of the command line."""
        name, is_given, value = word.partition("=")
        if name.startswith("--"):  # vLLM takes --max_model_len, too
            name = name.replace("_", "-")
        return cls(SHORT.get(name, name), value if is_given else None)


Arguments = Callable[[], Mapping[str, str]]
"""Returns the names of vLLM's engine arguments, each with its `argument_names.Kind`; asked only for a flag that nothing else explains."""


def translate(
    words: Iterable[str],
    own: Iterable[str] = (),
    arguments: Arguments = dict[str, str],
    *,
    needs_model: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> list[str]:
    """Translate a command line of `vllm serve` into our flags. Unknown words stay as they are.

    Args:
        words: the command line.
        own: our flags, which are never taken for vLLM's.
        arguments: of vLLM's engine.
        needs_model: the command takes a model as a separate word. Where the line begins with no such word, as vLLM's does, and has no --model,
            the last of several words behind a flag that has one value here is the model.
        say: gets a sentence for each flag that asks for what this server does without.

    Raises:
        FlagRefusal: a flag that has no meaning here.
    """
    left, made, ours = _whole(words), list[str](), frozenset(own)
    if needs_model:
        needs_model = left[:1] == [] or left[0].startswith("-")
        needs_model &= not any(_Flag.of(word).name == "--model" for word in left)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*made, word, *left]
        if not word.startswith("-") or word == "-":
            made.append(word)
            continue
        flag = _in_full(_Flag.of(word), ours, arguments)
        if flag.name in FURTHER and flag.value is None:
            values = _taken(left)
            if needs_model and len(values) > 1:
                if flag.name == "--api-key":
                    # A key that is taken for a model's name would be shown, and be asked for at the hub.
                    raise FlagRefusal(
                        "--api-key: put the model before it, or repeat it for each key, so that no key is taken for the model"
                    )
                left.insert(0, values.pop())
            made += [flag.name, *values[:1]]
            made += [part for value in values[1:] for part in (FURTHER[flag.name], value)]
        else:
            made += _translated(flag, left, ours, arguments, say)
    return made


def _in_full(flag: _Flag, own: frozenset[str], arguments: Arguments) -> _Flag:
    """Return a flag whose name may be cut short, as vLLM takes it, by its whole name: the only one that begins so."""
    if flag.name in own or flag.name in _IN_TABLES or not flag.name.startswith("--"):
        return flag
    known = {*own, *_IN_TABLES, *(f"--{name.replace('_', '-')}" for name in arguments())}
    found = [name for name in known if name.startswith(flag.name)]
    return flag if flag.name in known or len(found) != 1 else flag._replace(name=found[0])


def nearest(flag: str, own: Iterable[str], arguments: Arguments) -> list[str]:
    """Return the one flag that a mistyped one may have been, of ours and of vLLM's; none where all are unlike it."""
    known = [*own, *_IN_TABLES]
    known += [f"--{name.replace('_', '-')}" for name in arguments()]
    return difflib.get_close_matches(flag, known, n=1, cutoff=_LIKENESS)


def _whole(words: Iterable[str]) -> list[str]:
    """Return the line with each flag of vLLM's in one form: -O3 by its name, and the fields of a JSON object together, at the line's end."""
    left, made, objects = list(words), list[str](), dict[str, dict[str, Any]]()
    while left and left[0] != "--":
        word = left.pop(0)
        has_value = bool(left) and not is_flag(left[0])
        if (level := _LEVEL.fullmatch(word)) is not None and (level[1] or has_value):
            made.append(f"--optimization-level={level[1] or left.pop(0)}")
        elif (field := _FIELD.fullmatch(word)) is not None and (field[3] is not None or has_value):
            fields = objects.setdefault(_Flag.of(field[1]).name, {})
            *outer, last = field[2].split(".")
            for name in outer:
                deeper = fields.get(name)
                fields[name] = deeper if isinstance(deeper, dict) else {}
                fields = fields[name]
            value = field[3] if field[3] is not None else left.pop(0)
            if last.endswith("+"):  # entries of a list
                before = fields.get(last[:-1])
                fields[last[:-1]] = [*(before if isinstance(before, list) else ()), *value.split(",")]
            else:
                fields[last] = _plain(value)
        else:
            made.append(_JOINED.sub(r"\1=\2", word))
    return [*made, *(f"{name}={json.dumps(fields)}" for name, fields in objects.items()), *left]


def _plain(value: str) -> Any:
    """Return what a field's text means: JSON, or a number such as 32k, or the text itself."""
    for text in (value, str(_large(value))):
        with suppress(json.JSONDecodeError):
            return json.loads(text)
    return value


def _translated(
    flag: _Flag, left: list[str], own: frozenset[str], arguments: Arguments, say: Callable[[str], object]
) -> list[str]:
    """Translate one flag; its values are taken from `left`."""
    name, value = flag
    if name in INSTEAD:
        return [INSTEAD[name]]
    if name in LIMITS:
        num_images = _images_of(value if value is not None or not left else left.pop(0))
        return [] if num_images is None else [f"{LIMITS[name]}={num_images}"]
    if name in SEVERAL:
        values = [value] if value is not None else left[:1] if name == _ONE_WORD else _taken(left)
        del left[: value is None and name == _ONE_WORD]
        parts = [part for each in values for part in _parts(each) if part not in _NONE]
        return [word for part in parts for word in (SEVERAL[name], part)]
    if name in RENAMED:
        name = RENAMED[name]
    elif name not in own:
        if _changes_nothing(flag, left, say):
            return []
        if (pair := _as_argument(flag, left, arguments())) is not None:
            return ["--engine-arg", pair]
    given = value if value is not None else next(iter(left), None)
    if name in _MAY_BE_NONE and given in _NONE:
        del left[: value is None]
        return []
    is_written_otherwise = flag.name in (*_LARGE_NUMBERS, _IN_BYTES) or name in _SAME_VALUES
    if value is None and is_written_otherwise and left and not is_flag(left[0]):
        value = left.pop(0)
    if value is not None:
        value = _SAME_VALUES.get(name, {}).get(value, value)
    if flag.name in _LARGE_NUMBERS:
        value = _large(value)
    elif flag.name == _IN_BYTES and (num_bytes := _large(value) or "").isdecimal():
        value = str(int(num_bytes) / GIB)
    return [name if value is None else f"{name}={value}"]


def _changes_nothing(flag: _Flag, left: list[str], say: Callable[[str], object]) -> bool:
    """Return whether a flag changes nothing here; its value is taken from `left`. What the server does without is said.

    Raises FlagRefusal for a flag that asks for another kind of server.
    """
    name, value = flag
    switch = name.replace("--no-", "--", 1)
    if switch != name and name not in _WITHOUT:
        if switch in ALWAYS:
            say(f"{name} changes nothing here: {ALWAYS[switch]}")
        return switch in _WITHOUT
    if name not in _WITHOUT:
        return False
    if value is None and name in _WITH_VALUE:
        if not left or is_flag(left[0]):
            raise FlagRefusal(lacks_value(name))
        value = left.pop(0)
    if value not in _SO_ANYWAY.get(name, ()):
        if name in REFUSED:
            raise FlagRefusal(f"{name}: {REFUSED[name]}")
        if name in LEFT_OUT:
            say(f"{name} changes nothing here: {LEFT_OUT[name]}")
    return True


def _as_argument(flag: _Flag, left: list[str], arguments: Mapping[str, str]) -> str | None:
    """Return an engine argument of vLLM's as NAME=VALUE, whose values are taken from `left`; None for a flag that is none, or lacks its value."""
    name = flag.name.removeprefix("--").replace("-", "_")
    switch, kind = name.removeprefix("no_"), arguments.get(name)
    if flag.value is not None and kind is not None:
        return f"{name}={flag.value}"
    if arguments.get(switch) == "switch":
        return f"{switch}={str(switch == name).lower()}"
    if kind == "values":
        values = _taken(left)
    else:
        values = [left.pop(0)] if kind is not None and left and not is_flag(left[0]) else []
    if not values and kind not in (None, "value or none"):
        raise FlagRefusal(lacks_value(flag.name))
    if not values:
        return f"{name}=true" if kind is not None else None
    return f"{name}={values[0] if len(values) == 1 else json.dumps(values)}"


def _images_of(value: str | None) -> int | None:
    """Return how many pictures of one call a JSON object of vLLM's allows; None where it bounds none. Raises FlagRefusal for another form."""
    try:
        found = json.loads(value or "").get("image")
        return None if found is None else int(found["count"] if isinstance(found, dict) else found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FlagRefusal(
            f'--limit-mm-per-prompt: expected a JSON object such as {{"image": 2}}, got {value!r}'
        ) from error


def _large(value: str | None) -> str | None:
    """Return 32k as 32000; anything else unchanged."""
    found = _LARGE_NUMBER.fullmatch(value or "")
    return str(int(float(found[1]) * _UNITS[found[2]])) if found is not None else value


def _taken(left: list[str]) -> list[str]:
    """Take the values behind a flag, up to the next flag."""
    values = []
    while left and not left[0].startswith("-"):
        values.append(left.pop(0))
    return values


def _parts(value: str) -> list[str]:
    """Return the entries of a JSON list, or the value alone."""
    if value.lstrip().startswith("["):
        try:
            return [str(entry) for entry in json.loads(value)]
        except json.JSONDecodeError:
            pass
    return [value]
