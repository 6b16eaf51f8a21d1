"""The `overture` command. Imports at the top are light: help and version do not wait for the engine's libraries."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from engine_bridge.driver.vllm_api.argument_names import engine_arguments
from gateway.commands.backup_command import backup, restore
from gateway.commands.keys_command import keys
from gateway.commands.kv_command import kv
from gateway.commands.nodes_command import nodes
from gateway.commands.users_command import users
from gateway.errors import StartupError
from gateway.packages import installed, vllm
from gateway.settings.config import SETTINGS, Config
from gateway.settings.declared import GROUPS, Setting
from gateway.settings.sources import load_config
from gateway.settings.vllm_flags import FlagRefusal, nearest, translate
from gateway.settings.yaml_file import YamlRefusal, with_lines_of_file
from overture_client import __version__
from overture_client.chat_command import chat
from overture_client.command_line import Command, Group
from overture_client.completion_command import completion

EXIT_USAGE = 2  # as click has it

_METAVARS = {
    "api_keys": "KEY",
    "body_timeout_s": "SECONDS",
    "chat_template": "FILE",
    "cluster_cert": "FILE",
    "cluster_host": "ADDRESS",
    "cluster_key": "FILE",
    "cluster_port": "PORT",
    "cluster_token_file": "FILE",
    "cors_origins": "ORIGIN",
    "default_chat_template_kwargs": "JSON",
    "download_dir": "FOLDER",
    "drain_timeout_s": "SECONDS",
    "embedding_engine_args": "NAME=VALUE",
    "engine_args": "NAME=VALUE",
    "head_timeout_s": "SECONDS",
    "host": "ADDRESS",
    "keepalive_timeout_s": "SECONDS",
    "kv_cache_gib": "GIB",
    "kv_disk_gib": "GIB",
    "kv_host_gib": "GIB",
    "lora_modules": "NAME=FOLDER",
    "max_body_bytes": "BYTES",
    "max_frame_bytes": "BYTES",
    "max_stored_mib": "MIB",
    "mcp_servers": "NAME=URL",
    "mcp_timeout_s": "SECONDS",
    "mcp_result_kib": "KIB",
    "model": "PATH|NAME",
    "length_predictor": "MODULE:NAME",
    "oidc_client_secret_file": "FILE",
    "oidc_issuer": "URL",
    "operator_keys": "KEY",
    "port": "PORT",
    "ray_address": "HOST:PORT",
    "rerank_chat_template": "FILE",
    "rerank_engine_args": "NAME=VALUE",
    "speculative_config": "JSON",
    "reasoning_parser_plugin": "FILE|MODULE",
    "ssl_ca_certs": "FILE",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "tenant_weights": "NAME=WEIGHT",
    "tool_parser_plugin": "FILE|MODULE",
    "served_model_aliases": "NAME",
    "trusted_proxies": "ADDRESS",
    "trusted_user_header": "HEADER",
    "uds": "PATH",
}


# The settings that the help shows by itself. Chosen: what a first server, a larger model and a server for a team need.
MAIN_SETTINGS = frozenset(
    """
    model host port data_dir device max_model_len max_num_seqs gpu_memory_utilization kv_host_gib kv_disk_gib adapters_dir api_key_file
    ssl_certfile ssl_keyfile nodes
    """.split()
)
ALL = "all"
_SHOWN = "gateway.cli: groups of settings that the help shows"


class SettingsCommand(Command):
    """A command that takes every setting of `Config` as a flag; its help shows the main ones, and others by groups (`--help GROUP`)."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.params.extend(_option(setting) for setting in SETTINGS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Translate vLLM's flags into ours, then parse."""
        if ctx.resilient_parsing:  # a shell completes a line, which need not be right yet
            return super().parse_args(ctx, args)
        own = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
        try:
            takes_model = any(isinstance(param, click.Argument) for param in self.params)
            whole = with_lines_of_file(args, engine_arguments)
            line = translate(whole, own, engine_arguments, needs_model=takes_model, say=_say)
            return super().parse_args(ctx, line)
        except (FlagRefusal, YamlRefusal) as error:
            raise click.UsageError(f"{error} (docs/from-vllm.md)", ctx) from error
        except click.NoSuchOption as error:
            meant = nearest(error.option_name, own, engine_arguments)
            raise click.NoSuchOption(error.option_name, possibilities=meant, ctx=ctx) from error

    def get_help_option(self, ctx: click.Context) -> click.Option:
        """Return `--help`, behind which a group of settings may stand."""
        return click.Option(
            self.get_help_option_names(ctx),
            is_flag=False,
            flag_value="",
            metavar="[GROUP]",
            expose_value=False,
            is_eager=True,
            callback=_show_help,
            help=f"Show this, or the settings of a group: {', '.join(_words(GROUPS))}, or {ALL}.",
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, then settings: the main ones, or those of the groups that were asked for."""
        shown = ctx.meta.get(_SHOWN)
        by_name = {setting.name: setting for setting in SETTINGS}
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            setting, record = by_name.get(param.name or ""), param.get_help_record(ctx)
            if record is None or isinstance(param, click.Argument):
                continue
            if setting is None:
                groups["Options"].append(record)
            elif setting.group in shown if shown is not None else setting.name in MAIN_SETTINGS:
                groups.setdefault(setting.group if shown is not None else "Main settings", []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def _say(line: str) -> None:
    click.echo(f"overture: {line} (docs/from-vllm.md)", err=True)


def _show_help(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Print the help, of the groups that `value` names, and end the command. Raises UsageError for an unknown group."""
    if value is None or ctx.resilient_parsing:
        return
    if value:
        asked = _words([value])[0]
        ctx.meta[_SHOWN] = {group for group in GROUPS if asked in (ALL, *_words([group]))}
        if not ctx.meta[_SHOWN]:
            known = ", ".join((*_words(GROUPS), ALL))
            raise click.UsageError(f"{value!r} is no group of settings. Groups: {known}.", ctx)
    click.echo(ctx.get_help(), color=ctx.color)
    ctx.exit()


def _words(groups: Iterable[str]) -> list[str]:
    """Return groups as they are written behind `--help`: "KV tiers" is kv."""
    return [group.lower().partition(" ")[0] for group in groups]


def _option(setting: Setting) -> click.Option:
    """Return the flag of a setting. Values stay text: `load_config` converts and checks them, as it does for every source."""
    if setting.is_bool:
        return click.Option(
            [f"{setting.flag}/--no-{setting.flag[2:]}", setting.name], default=None, help=setting.description
        )
    default = "" if setting.default in ("", "unset", "none") else f"  [{setting.default}]"
    return click.Option(
        [setting.flag, setting.name],
        multiple=setting.is_list,
        metavar=_metavar(setting),
        help=setting.description + default,
    )


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    if setting.name in _METAVARS:
        return _METAVARS[setting.name]
    if setting.expected.startswith(("an integer", "a number")):
        return "N"
    return "PATH" if setting.expected == "a path" else "NAME"


model_argument = click.argument("named_model", metavar="[MODEL]", required=False)
config_file_option = click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="Config file (TOML, or vLLM's YAML of flags).  [overture.toml, if there]",
)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 116},
    epilog="""\b
Start the server        overture serve
Add a machine to it     overture node
See its nodes           overture nodes
Talk to it              overture chat
Ask one thing           overture chat "What is a sonnet?"
Let only some in        overture users add alice --key-file keys
Keep a copy of it all   overture backup FOLDER
Measure this machine    overture profile
Ask what is wrong       overture doctor
""",
)
@click.version_option(__version__, prog_name="overture", message="%(prog)s %(version)s")
def cli() -> None:
    """Overture: a chat page, a chat socket and an OpenAI-style API in front of vLLM."""


@cli.command(
    cls=SettingsCommand,
    epilog="""\b
Every setting can also stand in the config file (max_num_seqs = 32) or in the
environment (OVERTURE_MAX_NUM_SEQS=32). Flags win over the environment, and
that wins over the file. `--help all` shows all settings.

\b
Examples:
  overture serve
  overture serve --help access
  overture serve ./my-model --adapters-dir ./my-adapters
  overture serve --host 0.0.0.0 --api-key-file keys.txt --log-format json
""",
)
@model_argument
@config_file_option
def serve(config_file: str | None, named_model: str | None, **flags: Any) -> None:
    """Start the gateway and its engine, until Ctrl+C or SIGTERM.

    MODEL is a folder or a name on a hub, as --model; without it the demo model is served. The flags of `vllm serve` are understood, too:
    docs/from-vllm.md.
    """
    config = _load(config_file, _with_model(flags, named_model))
    from gateway.settings import logs

    logs.setup(config.log_format, config.log_level)
    _check_machine(config)
    from gateway.app import run

    run(config)


def _check_machine(config: Config) -> None:
    """Say what to know before the server starts. Ends the process where it cannot serve."""
    from gateway.commands.doctor import at_start
    from gateway.commands.doctor_command import findings

    problems, advice = at_start(config)
    for line in findings(problems or advice):
        click.echo(line, err=True)
    if problems:
        click.echo(
            "This machine cannot serve so. `overture doctor` with the same flags tells more.", err=True
        )
        raise SystemExit(2)


@cli.command(
    cls=SettingsCommand,
    epilog="""\b
Give it the model and the settings that the gateway's own nodes have, and the
cluster's token, certificate and key (docs/operations/nodes.md).

\b
Examples:
  overture node --ray-address 10.0.0.1:6379 --cluster-host 10.0.0.2 \\
      --cluster-token-file token --cluster-cert cluster.crt --cluster-key cluster.key
""",
)
@config_file_option
def node(config_file: str | None, **flags: Any) -> None:
    """Add this machine to a cluster as a node, until Ctrl+C or SIGTERM.

    Then it takes no new work, ends what runs, and leaves.
    """
    config = _load(config_file, flags)
    if config.ray_address is None:
        raise click.UsageError("which cluster? Give --ray-address HOST:PORT")
    from gateway.settings import logs

    logs.setup(config.log_format, config.log_level)
    from gateway.commands import node_command

    node_command.run(config)


@cli.command(cls=SettingsCommand)
@model_argument
@config_file_option
def config(config_file: str | None, named_model: str | None, **flags: Any) -> None:
    """Show the settings in effect, and where each comes from.

    Takes the same flags as `serve`, so a start can be tried dry.
    """
    settings = _load(config_file, _with_model(flags, named_model))
    click.echo(settings.describe())
    for warning in settings.warnings():
        click.echo(f"warning: {warning}", err=True)


@cli.command(
    cls=SettingsCommand,
    epilog="""\b
Give it the settings that the server gets: a profile is for one model, device,
type, number of threads and release of vLLM. `overture serve` finds it in the
data folder. Run it while nothing else runs: what disturbs it is kept.

\b
Examples:
  overture profile
  overture profile --model ./my-model --seconds 300
""",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    metavar="N",
    help="How long to measure; the engine's start comes on top.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print what was measured as JSON, too, in the last line."
)
@config_file_option
def profile(config_file: str | None, seconds: float, as_json: bool, **flags: Any) -> None:
    """Measure how fast this machine runs the model, and keep it for the server.

    Times steps over prompt tokens, batch and context, copies of KV both ways, the disk, and adapters. It neither reads
    nor writes conversations or stored KV.
    """
    config = _load(config_file, flags)
    from gateway.settings import logs

    logs.setup(config.log_format, config.log_level)
    from gateway.commands import profile_command

    sys.exit(profile_command.profile(config, seconds, as_json))


@cli.command(
    cls=SettingsCommand,
    epilog="""\b
Give it the settings that the server gets. It starts no engine and keeps
nothing. Exit status: 0 if the server can serve, 1 if not.

\b
Examples:
  overture doctor
  overture doctor --model ./my-model --json
  overture doctor --vllm-source vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl
""",
)
@click.option(
    "--vllm-source",
    type=click.Path(exists=True, path_type=Path),
    metavar="PLACE",
    help="Check the vLLM in this folder or wheel in place of the installed one: before an upgrade.",
)
@click.option(
    "--names", is_flag=True, help="A line for each part of the server that stands on vLLM, moved or not."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on one line, for scripts.")
@config_file_option
def doctor(
    config_file: str | None, vllm_source: Path | None, names: bool, as_json: bool, **flags: Any
) -> None:
    """Say whether this machine can serve, and what the server would do without.

    Looks at the machine, the versions, every name of vLLM's that the server uses, the model's profile and the data folder.
    """
    from gateway.commands import doctor_command

    sys.exit(doctor_command.doctor(_load(config_file, flags), vllm_source, as_json, names))


cli.add_command(backup)
cli.add_command(chat)
cli.add_command(completion)
cli.add_command(keys)
cli.add_command(kv)
cli.add_command(nodes)
cli.add_command(restore)
cli.add_command(users)


@cli.command("version")
def show_version() -> None:
    """Show the versions of Overture, its engine and Python."""
    click.echo(f"overture {__version__}")
    for label, found in {"vllm": vllm(), "torch": installed("torch")}.items():
        click.echo(f"{label} {found or 'not installed'}")
    click.echo(f"python {platform.python_version()}")


def _with_model(flags: dict[str, Any], named: str | None) -> dict[str, Any]:
    """Return the flags with the model that was named without a flag. Raises UsageError if both are given and differ."""
    if named is None:
        return flags
    if flags.get("model") not in (None, named):
        raise click.UsageError(f"which model? {named} is named, and --model says {flags['model']}")
    return flags | {"model": named}


def _load(config_file: str | None, flags: dict[str, Any]) -> Config:
    return load_config(flags, config_file=config_file)


def _open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that were closed before the start, as `overture serve >&-` does.

    Libraries take their being there for granted, and a file or a socket that got such a number would be written to as output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(
                os.devnull, os.O_RDWR
            )  # the lowest number that is free, so the one that was closed
            os.set_inheritable(opened, opened == number)
            setattr(sys, name, os.fdopen(opened, mode))


def main(argv: list[str] | None = None) -> None:
    """Run the command. Mistakes of the operator end in one line on stderr and exit code 2, never in a traceback."""
    _open_standard_streams()
    try:
        cli.main(args=argv, prog_name="overture")
    except StartupError as error:
        click.echo(f"overture: {error}", err=True)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
