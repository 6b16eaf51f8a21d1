"""The command line: what it says, the exit codes that scripts rely on, and vLLM's flags as ours understands them (docs/from-vllm.md)."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp import web
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from engine_bridge.driver.vllm_api.argument_names import engine_arguments
from engine_bridge.settings import engine_arguments as engine_rules
from gateway import cli
from gateway.settings.config import SETTINGS
from gateway.settings.vllm_flags import (
    ALWAYS,
    INSTEAD,
    LEFT_OUT,
    LIMITS,
    REFUSED,
    RENAMED,
    SEVERAL,
    FlagRefusal,
    translate,
)
from overture_client.completion_command import COMPLETE_VARIABLE
from tests.served import served

ROOT = Path(cli.__file__).parents[1]


def run(*argv: str) -> Result:
    return CliRunner().invoke(cli.cli, argv)


def run_process(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OVERTURE_")}
    command = [sys.executable, "-m", "gateway.cli", *argv]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60
    )


def test_the_help_loads_none_of_the_slow_libraries() -> None:
    code = (
        "import sys\nfrom gateway.cli import cli\n"
        "cli.main(['serve', '--help'], standalone_mode=False)\n"
        "slow = {'torch', 'vllm', 'aiohttp', 'transformers', 'numpy', 'asyncio', 'rich', 'websockets'}\n"
        "sys.exit(', '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_closed_standard_streams_lead_nowhere_and_their_numbers_are_no_other_files(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = (
        "import os, sys\nfrom gateway.cli import main\n"
        "try: main(['version'])\n"
        "except SystemExit: sys.stdout.flush()\n"
        "places = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]\n"
        f"open({str(seen)!r}, 'w').write(' '.join(places))"
    )
    argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=60)
    assert seen.read_text() == "/dev/null /dev/null /dev/null"


def test_a_chat_template_is_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("Grüße {{ messages }}", encoding="utf-8")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from gateway.app import node_config\nfrom gateway.settings.config import Config\n"
        f"print(ascii(node_config(Config(data_dir=Path('.'), chat_template={str(template)!r})).engine.chat_template))"
    )
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "'Gr\\xfc\\xdfe {{ messages }}'\n", done.stderr


def flags_in(text: str) -> set[str]:
    """The flags that a help lists."""
    return {line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")}


def test_the_help_shows_what_most_people_need_and_the_rest_by_groups() -> None:
    short = run("serve", "--help").stdout
    assert len(flags_in(short)) < 18 and {"--model", "--port", "--api-key-file"} <= flags_in(short)
    assert short.index("--config") < short.index("Main settings:") < short.index("--port")
    own = run("doctor", "-h").stdout
    assert own.index("--vllm-source") < own.index("--host")
    access = run("serve", "--help", "access").stdout
    assert "--trusted-user-header" in access and "--port" not in access and "Main settings" not in access
    assert "--kv-host-gib" in run("node", "--help=KV").stdout
    every = run("serve", "--help", "all").stdout
    assert {setting.flag for setting in SETTINGS if not setting.is_bool} <= flags_in(every)
    assert all(f"--no-{setting.flag[2:]}" in every for setting in SETTINGS if setting.is_bool)
    wrong = run("serve", "--help", "nope")
    assert wrong.exit_code == 2 and "no group of settings" in wrong.stderr and "scheduling" in wrong.stderr


def test_the_first_help_shows_a_command_a_line() -> None:
    from overture_client import command

    for group in (cli.cli, command.cli):
        lines = [line.strip() for line in CliRunner().invoke(group, ["--help"]).stdout.splitlines()]
        assert "Talk to it              overture chat" in lines


def test_a_new_key_matches_its_line(tmp_path: Path) -> None:
    from gateway.access.auth import KeyRing

    result = run("keys", "new", "--name", "alice")
    key, line = result.stdout.splitlines()
    assert key not in line
    path = tmp_path / "keys.txt"
    path.write_text(line + "\n", encoding="utf-8")
    path.chmod(0o600)
    assert KeyRing(key_file=path).authenticate(key).name == "alice"


@pytest.mark.parametrize(
    ("argv", "stdin", "expected"),
    [
        (("serve", "--port", "many"), "", "^overture: --port: expected an integer from .*, got 'many'\n$"),
        (("chat", "--url", "nonsense://x", "hello"), "", "not the address of a server"),
        (("chat",), "  \n", "nothing to ask"),
    ],
)
def test_wrong_use_is_said_with_exit_code_2(argv: tuple[str, ...], stdin: str, expected: str) -> None:
    done = run_process(*argv, stdin=stdin)
    assert done.returncode == 2
    assert re.search(expected, done.stderr) and "Traceback" not in done.stderr


def test_the_command_answers_what_the_script_asks_with_flags_of_serve() -> None:
    asked = {COMPLETE_VARIABLE: "bash_complete", "COMP_WORDS": "overture serve --kv-h", "COMP_CWORD": "2"}
    result = CliRunner().invoke(cli.cli, [], prog_name="overture", env=asked)
    assert result.output.splitlines() == ["plain,--kv-host-gib"]


OWN = {setting.flag for setting in SETTINGS}
PAGE = Path(cli.__file__).parents[1] / "docs" / "from-vllm.md"
# A value of the right form for each flag that is not a switch.
VALUES = {
    "--tool-call-parser": "hermes",
    "--lora-modules": "pirate=demo/adapters/pirate",
    "--allowed-origins": '["https://a.example", "https://b.example"]',
    "--uvicorn-log-level": "warning",
    "-q": "awq",
    "--limit-mm-per-prompt": '{"image": 2}',
    "--model": "demo/model",
    "--root-path": "/llm",
    "--dtype": "float32",
    "--scheduling-policy": "fcfs",
    "--chat-template-content-format": "openai",
    "--default-chat-template-kwargs": '{"enable_thinking": false}',
    "--speculative-config": '{"method": "ngram"}',
    "--gpu-memory-utilization": "0.5",
    "--device-memory-utilization": "0.5",
    "--log-level": "INFO",
    "--chat-template": "demo/model/chat_template.jinja",
}
WORDS = ("--host", "--served-model-name", "--api-key", "--reasoning-parser", "--quantization")
WORDS += ("--kv-cache-dtype", "--revision", "--download-dir")
SWITCHES = (
    "--enable-force-include-usage",
    "--return-tokens-as-token-ids",
    "--enable-prompt-embeds",
    "--enable-sleep-mode",
    "--enable-expert-parallel",
    "--enforce-eager",
    "--trust-remote-code",
    "--enable-prefix-caching",
)
FILES = (
    "--ssl-certfile",
    "--ssl-keyfile",
    "--ssl-ca-certs",
    "--ssl-cert-reqs",
    "--ssl-ciphers",
    "--chat-template",
)


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    """vLLM's flags and ours, of each row of the table under a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) > 3 and "`" in cells[1]:
            found.append((re.findall(r"`([^`]+)`", cells[1]), re.findall(r"`([^`]+)`", cells[2])))
    assert found
    return found


def shown(*argv: str) -> str:
    """What `overture config` says of a command line."""
    result = CliRunner().invoke(cli.cli, ["config", *argv], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_flag_of_ours_on_the_page_exists_and_takes_what_vllms_does() -> None:
    for heading in ("Flags with another name", "The same name"):
        for (theirs,), (ours,) in rows(heading):
            assert ours in OWN, ours
            value = VALUES.get(theirs, "word" if theirs in WORDS else "1")
            argv = [theirs] if theirs in (*SWITCHES, *INSTEAD) else [theirs, value]
            if theirs in FILES:  # whose files would have to be there
                assert translate(argv, OWN) == argv
            else:
                assert f"flag {ours}\n" in shown(*argv), theirs


def test_a_setting_that_is_called_like_an_engine_argument_means_the_same() -> None:
    """The page says of each that it does; the limit of an answer's log probabilities was once called like vLLM's of a token's."""
    alike = {setting.flag for setting in SETTINGS if setting.name in engine_arguments()}
    assert alike <= {ours for _, (ours,) in rows("The same name")}
    assert "max_logprobs=-1" in shown("--max-logprobs", "-1")


def test_the_page_has_every_flag_of_the_tables_and_no_other() -> None:
    renamed = {theirs: ours for (theirs,), (ours,) in rows("Flags with another name")}
    assert renamed == {
        **RENAMED,
        **SEVERAL,
        **LIMITS,
        **{name: ours.partition("=")[0] for name, ours in INSTEAD.items()},
    }
    assert {flag for (flag,), _ in rows("Always so")} == ALWAYS.keys()
    for heading, flags, arguments in (
        ("Served without", LEFT_OUT, engine_rules.LEFT_OUT),
        ("Refused", REFUSED, engine_rules.RULED_OUT),
    ):
        named = {f"--{name.replace('_', '-')}" for name in arguments}
        assert {flag for those, _ in rows(heading) for flag in those} == flags.keys() | (
            named - ALWAYS.keys() - RENAMED.keys()
        )


def test_none_of_our_own_flags_is_taken_for_vllms() -> None:
    known = {*ALWAYS, *LEFT_OUT, *LIMITS, *REFUSED, *RENAMED, *SEVERAL}
    assert not known & OWN
    arguments = engine_rules.LEFT_OUT | engine_rules.RULED_OUT
    assert not {setting.name for setting in SETTINGS} & arguments.keys()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["m", "--max_model_len=9"], ["m", "--max-model-len=9"]),
        (
            ["--lora-modules", "a=x", "b=y", "--port", "1"],
            ["--lora-module", "a=x", "--lora-module", "b=y", "--port", "1"],
        ),
        (["--lora-modules=a=x"], ["--lora-module", "a=x"]),
        (["--allowed-origins", "https://a.example"], ["--cors-origin", "https://a.example"]),
        (["-tp", "2", "m"], ["--tensor-parallel-size", "2", "m"]),
        (["-ep", "-q=fp8"], ["--enable-expert-parallel", "--quantization=fp8"]),
        (["--limit-mm-per-prompt", '{"image": 2, "video": 0}', "m"], ["--max-images=2", "m"]),
        (['--limit-mm-per-prompt={"image": {"count": 3, "width": 64}}'], ["--max-images=3"]),
        (['--limit-mm-per-prompt={"audio": 1}'], []),
        (["--", "--enable-lora"], ["--", "--enable-lora"]),
        (["--something", "else"], ["--something", "else"]),
        (["--max-model-len", "32k", "m"], ["--max-model-len=32000", "m"]),
        (["--max-model-len=1.5K"], ["--max-model-len=1536"]),
        (["--dtype", "half", "m"], ["--dtype=float16", "m"]),
        (["--dtype=bfloat16"], ["--dtype=bfloat16"]),
        (["--dtype"], ["--dtype"]),
        (["--max-model-len", "many"], ["--max-model-len=many"]),
        (["--allowed-methods", '["GET"]', "--port", "1"], ["--port", "1"]),
        (["--max-model-len", "-1", "m"], ["--max-model-len=auto", "m"]),
        (["--log-level", "INFO", "--uvicorn-log-level=trace"], ["--log-level=info", "--log-level=debug"]),
        (["--no-enable-lora", "m"], ["--adapters=off", "m"]),
        (["--no-enable-log-outputs", "--seed", "1"], ["--seed", "1"]),
        (["--response-role", "assistant", "-asc=1", "m"], ["m"]),
        (["--max-log-len", "100", "m"], ["m"]),
        (["--allowed-origins", '["*"]', "m"], ["--cors-origin", "*", "m"]),
        (["--kv-cache-memory-bytes", "1.5g", "m"], ["--kv-cache-gib=1.3969838619232178", "m"]),
        (["--kv-cache-memory-bytes=2G"], ["--kv-cache-gib=2.0"]),
        (["--kv-cache-memory-bytes", "much"], ["--kv-cache-gib=much"]),
        (["--kv-offloading-size", "4"], ["--kv-host-gib", "4"]),
        (["--max-num-batched", "2k", "m"], ["--max-num-batched-tokens=2000", "m"]),
        (["--tool-call", "hermes", "--allowed-o", "*"], ["--tool-parser", "hermes", "--cors-origin", "*"]),
        (["--max-n", "1"], ["--max-n", "1"]),
        (["-qfp8", "-q", "None", "m"], ["--quantization=fp8", "m"]),
        (["--host", "", "--tool-call-parser=None", "--otlp-traces-endpoint", "", "m"], ["m"]),
        (["--max-model-len", "None", "--lora-modules", "", "--port", "1"], ["--port", "1"]),
        (["--api-key", ""], ["--api-key", ""]),
        (["-O3", "m"], ["--optimization-level=3", "m"]),
        (["-O", "2"], ["--optimization-level=2"]),
        (["-O"], ["-O"]),
        (["-cc.mode=3", "--", "-O3"], ['--compilation-config={"mode": 3}', "--", "-O3"]),
        (
            ["m", "--speculative-config.method", "ngram", "--speculative_config.a.b=4k", "--seed", "1"],
            ["m", "--seed", "1", '--speculative-config={"method": "ngram", "a": {"b": 4000}}'],
        ),
        (["--x.a=1", "--x.a.b=2"], ['--x={"a": {"b": 2}}']),
        (["--x.a+=b,c", "--x.a+", "d", "--x.n", "1g"], ['--x={"a": ["b", "c", "d"], "n": 1000000000}']),
        (["--api-key=a.b", "--x.a"], ["--api-key=a.b", "--x.a"]),
    ],
)
def test_a_line_of_vllms_becomes_one_of_ours(argv: list[str], expected: list[str]) -> None:
    assert translate(argv, OWN) == expected


def test_a_flag_of_an_engine_argument_is_taken_by_its_name_and_any_other_is_unknown() -> None:
    line = ["m", "--hf-overrides", '{"a": 1}', "--generation-config=vllm", "--language-model-only"]
    line += ["--no_async_scheduling", "--enable-eplb=false"]
    made = translate(line, OWN, engine_arguments)
    given = ['hf_overrides={"a": 1}', "generation_config=vllm", "language_model_only=true"]
    given += ["async_scheduling=false", "enable_eplb=false"]
    assert made[0] == "m" and made[2::2] == given and set(made[1::2]) == {"--engine-arg"}
    assert "cpu_offload_gb=4" in shown("--cpu-offload-gb", "4")
    several = ["--logits-processors", "a:B", "c:D", "--hf-token", "--ignore-patterns", "x", "--seed", "1"]
    *made, seed, number = translate(several, OWN, engine_arguments)
    assert made[1::2] == ['logits_processors=["a:B", "c:D"]', "hf_token=true", "ignore_patterns=x"]
    assert set(made[::2]) == {"--engine-arg"} and (seed, number) == ("--seed", "1")
    for wrong in (["--cpu-offload-gigs", "4"], ["--no-cpu-offload-gb"]):
        assert translate(wrong, OWN, engine_arguments) == wrong
        assert "No such option" in run("config", *wrong).stderr
    for wrong in (["2"], ['{"image": "many"}'], []):
        with pytest.raises(FlagRefusal, match="expected a JSON object"):
            translate(["--limit-mm-per-prompt", *wrong], OWN)


@pytest.mark.parametrize(
    "flag",
    """
    --host --api-key --config --tool-server --max-log-len --cpu-offload-gb --allowed-origins --limit-mm-per-prompt -q --chat-template --dtype
    --max-model-len --ignore-patterns -O --hf-overrides.a --cc.mode
    """.split(),
)
def test_a_flag_without_its_value_takes_no_other_flag_for_it(flag: str) -> None:
    """Taken for a value, --api-key would leave the server open."""
    done = run("config", flag, "--api-key", "zzz")
    assert done.exit_code == 2 and "zzz" not in done.stderr


def every_option(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield each way to write an option that has a value, behind its command's words; of the many settings, which are alike, a few."""
    for name, each in command.commands.items() if isinstance(command, click.Group) else ():
        yield from every_option(each, *path, name)
    settings = {setting.name for setting in SETTINGS} - {"api_keys", "port"}
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag and option.name not in settings:
            yield from ((*path, word) for word in option.opts)


@pytest.mark.parametrize("line", every_option(cli.cli), ids=" ".join)
def test_no_option_of_any_command_takes_another_for_its_value(line: tuple[str, ...], tmp_path: Path) -> None:
    """`users add ada --key-file --operator` wrote a file of that name, with a key that was no operator's."""
    with CliRunner().isolated_filesystem(tmp_path):
        done = run(*line, "--operator")
        assert done.exit_code == 2 and f"{line[-1]} lacks its value" in done.stderr
        assert not os.listdir()


@pytest.mark.parametrize("word", ["None", "null"])
def test_a_word_for_nothing_is_no_key(word: str) -> None:
    done = run_process("config", "--api-key", word)
    assert done.returncode == 2 and "a key is missing" in done.stderr


@pytest.mark.parametrize(
    "line", ["--headless --po", "--config /none.yaml --po", "--enable-log-requests --po"]
)
def test_a_shell_completes_a_line_that_is_not_right_yet(line: str) -> None:
    words = ["overture", "serve", *line.split()]
    found = ShellComplete(cli.cli, {}, "overture", "X").get_completions(words[1:-1], words[-1])
    assert "--port" in [each.value for each in found]


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("--no-enable-auto-tool-choice --seed 1", "--seed 1"),
        ("--response-role user m", "m"),
        ("--api_server_count=4 --enable-log-requests m", "m"),
        ("--no-enable-chunked-prefill m", "m"),
    ],
)
def test_what_vllm_would_serve_and_this_server_lacks_is_left_out_with_a_line(line: str, made: str) -> None:
    said: list[str] = []
    assert translate(line.split(), OWN, engine_arguments, say=said.append) == made.split()
    assert said and all(re.match(r"^--[a-z-]+ changes nothing here: ...", each) for each in said)


def test_the_command_says_what_is_left_out_and_goes_on() -> None:
    done = run("config", "--enable-log-requests", "-dp", "2")
    assert done.exit_code == 0 and "data_parallel_size=2" in done.stdout
    assert done.stderr.startswith("overture: --enable-log-requests changes nothing here: prompts are never")


@pytest.mark.parametrize("line", ["--headless", "--middleware a.b", "--grpc-port=3"])
def test_a_flag_that_asks_for_another_server_is_refused_with_the_reason(line: str) -> None:
    with pytest.raises(FlagRefusal, match=r"^--[a-z-]+: ..."):
        translate(line.split(), OWN, engine_arguments)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("--max-model-lenn", "--max-model-len"),
        ("--enable-lorra", "--enable-lora"),
        ("--cpu-ofload-gb", "--cpu-offload-gb"),
        ("--tool-call-parsr", "--tool-call-parser"),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_nearest_one_of_ours_and_vllms(wrong: str, nearest: str) -> None:
    assert run("config", wrong, "4").stderr.endswith(f"No such option '{wrong}'. Did you mean '{nearest}'?\n")
    assert "mean" not in run("config", "--task", "embed").stderr


def test_the_longest_context_may_be_what_the_kv_cache_holds() -> None:
    assert re.search(r"max_model_len +auto +flag", shown("--max-model-len", "auto"))
    wrong = run_process("config", "--max-model-len", "some").stderr
    assert wrong == "overture: --max-model-len: expected an integer, at least 1, or auto, got 'some'\n"


def test_a_node_says_which_adapter_the_hub_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = [
        "--ray-address",
        "127.0.0.1:1",
        "--data-dir",
        str(tmp_path),
        "--lora-modules",
        "a=no-such/adapter",
    ]
    done = run_process("node", *line)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: lora_modules: no-such/adapter is no folder here" in done.stdout + done.stderr


def test_several_names_of_the_model_are_taken_and_a_model_behind_one_stays_the_model() -> None:
    def of(line: str, needs_model: bool = True) -> str:
        return " ".join(translate(line.split(), OWN, needs_model=needs_model))

    name, alias = "--served-model-name", "--served-model-alias"
    assert of(f"m {name} a b c --seed 1") == f"m {name} a {alias} b {alias} c --seed 1"
    assert of(f"{name} a b --model=m") == f"{name} a {alias} b --model=m"
    assert of(f"{name} a ./m") == f"{name} a ./m"
    assert of(f"{name} a b", needs_model=False) == f"{name} a {alias} b"
    assert of(name) == name
    assert of("m --api-key a b") == "m --api-key a --api-key b"
    assert of("--api-key a b --model=m") == "--api-key a --api-key b --model=m"
    # One of them may be meant as a model, and none is shown.
    with pytest.raises(FlagRefusal, match=r"^[^z]*$"):
        of("--api-key zzz zz")
    said = shown("demo/model", name, "a", "b", "c")
    assert re.search(r"served_model_name +a ", said) and re.search(r"served_model_aliases +b, c ", said)


class Nodes:
    """states: what each question finds a node to be, the last one from then on. asked: calls that change something, with their bodies."""

    def __init__(self) -> None:
        self.url = ""
        self.states: dict[str, list[dict[str, Any]]] = {"node-1": [{}], "node-2": [{}]}
        self.asked: list[tuple[str, Any, str | None]] = []
        self.refusal = ""

    async def list_all(self, request: web.Request) -> web.Response:
        now = {name: states.pop(0) if len(states) > 1 else states[0] for name, states in self.states.items()}
        totals = {"num_open": 2, "num_nodes": 2, "num_running": 3, "num_waiting": 1}
        return web.json_response(
            {"nodes": [node(name, **state) for name, state in now.items()], "totals": totals}
        )

    async def change(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json(), request.headers["Authorization"]))
        if self.refusal:
            return web.json_response({"error": {"message": self.refusal}}, status=409)
        return web.json_response({}, status=202)


def node(name: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"id": name, "state": "ready", "stage": "ready", "elapsed_s": 300, "error": None}
    found |= {"incarnation": "a", "is_draining": False}
    found["load"] = {"num_running": 3, "num_waiting": 1, "num_kv_blocks": 101, "num_free_kv_blocks": 25}
    found["kv"] = {"host": {"bytes": 1, "capacity_bytes": 2}, "disk": None}
    found["adapters"] = {"num_by_place": {"slot": 1, "disk": 4}}
    return found | changes


@pytest.fixture
def server() -> Iterator[Nodes]:
    nodes, app = Nodes(), web.Application()
    app.add_routes([web.get("/v1/nodes", nodes.list_all), web.post("/v1/nodes/{name}/{how}", nodes.change)])
    with served(app) as nodes.url:
        yield nodes


def overture(server: Nodes, *arguments: str) -> Result:
    options = ("--url", server.url, "--api-key", "the-key")
    return CliRunner().invoke(cli.cli, ["nodes", *options, *arguments], env={"COLUMNS": "140"})


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overture_client.nodes.LOOK_EVERY_S", 0.0)


def test_the_table_says_what_each_node_does(server: Nodes) -> None:
    server.states["node-2"] = [{"state": "starting", "stage": "loading the model", "load": None, "kv": None}]
    output = overture(server).output
    first, second = (line for line in output.splitlines() if line.startswith("node-"))
    assert first.split()[1:7] == ["ready", "3", "1", "75%", "50%", "-"]
    assert "1 of 5 in memory" in first and "5 min" in first
    assert "starting (loading the model)" in second
    assert "2 of 2 take requests; 3 running, 1 waiting." in output


def test_a_drain_ends_when_nothing_runs_there_any_more(server: Nodes) -> None:
    draining = {"state": "draining", "is_draining": True}
    idle = node("x")["load"] | {"num_running": 0, "num_waiting": 0}
    server.states["node-2"] = [draining, draining | {"load": idle}]
    result = overture(server, "drain", "node-2", "--drain-timeout-s", "7")
    assert server.asked == [("/v1/nodes/node-2/drain", {"force": False, "timeout_s": 7.0}, "Bearer the-key")]
    assert result.output.splitlines() == ["node-2: draining, 3 running, 1 waiting", "node-2: drained"]
    assert result.exit_code == 0


def test_all_nodes_restart_one_after_the_other_until_one_does_not_come_back(server: Nodes) -> None:
    away, back = {"state": "away", "incarnation": ""}, {"incarnation": "b"}
    # Each name is asked for once for all of them, once before its own restart, and then until it is back.
    server.states = {"node-1": [{}, {}, away, back], "node-2": [{}] * 6 + [away, back]}
    result = overture(server, "restart", "--all")
    both = ["/v1/nodes/node-1/restart", "/v1/nodes/node-2/restart"]
    assert [path for path, _, _ in server.asked] == both
    ready = [line.split(" after")[0] for line in result.output.splitlines() if "again" in line]
    assert ready == ["node-1: ready again", "node-2: ready again"] and result.exit_code == 0
    server.states["node-1"] = [{}, {}, {"state": "failed", "error": "no such model"}]
    result = overture(server, "restart", "--all")
    assert result.exit_code == 1 and "node-1: no such model" in result.output
    assert [path for path, _, _ in server.asked] == [*both, both[0]]
    server.refusal = "node-1 is the only one that takes requests"
    result = overture(server, "drain", "node-1")
    assert result.exit_code == 1
    assert result.output == "overture nodes: node-1 is the only one that takes requests\n"
