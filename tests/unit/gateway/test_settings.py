"""Settings: which source wins, what a mistake is answered with, and a data folder that others could read."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.protocol.errors import InvalidRequest
from gateway.errors import GatewayError
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, Config, ConfigError
from gateway.settings.data_folder import tighten
from gateway.settings.priorities import MAX_PRIORITY, checked_priority, parse_weights
from gateway.settings.sources import load_config


def load(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **options: Any
) -> Config:
    """Settings from nothing but what is given."""
    options.setdefault("cwd", Path("/nonexistent"))
    return load_config(flags or {}, environ or {}, **options)


def write(folder: Path, text: str) -> Path:
    path = folder / "overture.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_serve_the_demo_model_on_this_machine_only() -> None:
    config = load()
    assert (config.host, config.port, config.is_loopback) == ("127.0.0.1", 8000, True)
    assert (config.model, config.adapters_dir) == (str(DEMO_MODEL_DIR), DEMO_ADAPTERS_DIR)
    assert config.served_model_name == "overture-demo"
    assert not config.has_api_keys and not config.cors_origins and not config.allow_adapter_loading
    assert config.warnings() == []
    assert any("no API key" in each for each in load({"host": "0.0.0.0"}).warnings())


def test_origins_are_read_as_browsers_send_them_and_others_are_told_of() -> None:
    """A slash behind it, or a capital, had the page refused, and nothing said why."""
    sent = {
        "https://Chat.example/": "https://chat.example",
        "https://chat.example:443": "https://chat.example",
        "http://chat.example:443/": "http://chat.example:443",
        "http://[::1]:3000": "http://[::1]:3000",
        "app://obsidian.md": "app://obsidian.md",
        "file://": "file://",
        "null": "null",
    }
    config = load({"cors_origins": tuple(sent)})
    assert config.cors_origins == tuple(sent.values()) and config.warnings() == []
    others = ("https://me:secret@chat.example", "https://büro.example")
    for never in ("chat.example", "https://chat.example/app", "https://*.chat.example", *others):
        config = load({"cors_origins": (never,)})
        assert config.cors_origins == (never,) and [repr(never) in each for each in config.warnings()] == [
            True
        ]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Lists come as TOML lists, repeated flags or commas."""
    write(tmp_path, 'port = 1\nmax_num_seqs = 2\nmax_loras = 3\ncors_origins = ["https://a.example"]\n')
    environ = {
        "OVERTURE_PORT": "10",
        "OVERTURE_MAX_NUM_SEQS": "20",
        "OVERTURE_API_KEYS": "one-key, another-key",
    }
    config = load({"port": "100", "operator_keys": ("x", "y")}, environ, cwd=tmp_path)
    assert (config.port, config.max_num_seqs, config.max_loras, config.max_lora_rank) == (100, 20, 3, 128)
    assert (config.cors_origins, config.operator_keys) == (("https://a.example",), ("x", "y"))
    assert config.api_keys == ("one-key", "another-key")
    assert config.sources["port"] == "flag --port"
    assert config.sources["max_num_seqs"] == "env OVERTURE_MAX_NUM_SEQS"
    assert config.sources["max_loras"] == str(tmp_path / "overture.toml")
    assert "max_lora_rank" not in config.sources
    assert load({"port": None, "api_keys": (), "allow_adapter_loading": None}).sources == {}


def test_another_model_brings_its_own_name_and_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    config = load({"model": "Qwen3-8B"}, cwd=tmp_path)
    assert config.model == str(tmp_path / "Qwen3-8B")
    assert (config.served_model_name, config.adapters_dir) == ("Qwen3-8B", None)
    assert load({"model": "org/from-a-hub"}).model == "org/from-a-hub"
    assert load({"model": "org/from-a-hub"}).served_model_name == "from-a-hub"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"port": "many"}, "--port: expected an integer from 0 to 65535, got 'many'"),
        ({"port": "65536"}, "--port: expected an integer from 0 to 65535, got '65536'"),
        ({"device": "tpu"}, "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"kv_cache_gib": "0"}, "--kv-cache-gib: expected a number, more than 0, got '0'"),
        ({"kv_cache_gib": "nan"}, "--kv-cache-gib: expected a number, more than 0, got 'nan'"),
        ({"gpu_memory_utilization": "1.5"}, "expected a number, more than 0 and at most 1"),
        ({"host": ""}, "--host: expected a non-empty string"),
        ({"data_dir": ""}, "--data-dir: expected a path"),
        ({"chat_template": "gone.jinja"}, "chat_template: there is no file /nonexistent/gone.jinja"),
        ({"adapters_dir": "gone"}, "adapters_dir: there is no folder"),
        ({"model": "./gone"}, "model: ./gone: there is no such folder"),
        ({"model": "./gone.gguf"}, "GGUF files are not read"),
        ({"embedding_model": "./gone"}, "embedding_model: there is no model in ./gone"),
        ({"embedding_model": "a/overture-demo"}, "the chat model is called overture-demo, too"),
        ({"rerank_model": "./gone"}, "rerank_model: there is no model in ./gone"),
        (
            {"embedding_model": "a/b", "rerank_model": "c/b"},
            "rerank_model_name: the embedding model is called b, too",
        ),
        ({"rerank_chat_template": "gone.jinja"}, "rerank_chat_template: there is no file /nonexistent/gone"),
        (
            {"rerank_engine_args": ("runner=generate",)},
            "runner cannot be set here: such a model generates nothing",
        ),
        (
            {"embedding_engine_args": ("worker_cls=x",)},
            "embedding_engine_args: worker_cls cannot be set here",
        ),
        ({"embedding_model": "a/b", "embedding_model_name": " b"}, "embedding_model_name: no model may be"),
        ({"prot": "1"}, "did you mean port"),
        ({"nodes": "0"}, "nodes: 0 is for a cluster that others join"),
        ({"ray_address": "somewhere"}, "ray_address: expected HOST:PORT, got 'somewhere'"),
        ({"cluster_host": "0.0.0.0"}, "cluster_host: name one address of this machine"),
        ({"cluster_host": "gateway.example"}, "cluster_host: 'gateway.example' does not appear to be"),
        ({"cluster_host": "10.0.0.1"}, "nodes on 10.0.0.1 need TLS: give --cluster-cert and --cluster-key"),
        ({"cluster_cert": __file__}, "cluster_cert and cluster_key go together"),
        (
            {"api_key_file": "gone"},
            "gone (flag --api-key-file); `overture users add NAME --operator --key-file FILE`",
        ),
        ({"cluster_cert": "gone", "cluster_key": "gone"}, "cluster_cert: there is no file"),
        ({"oidc_issuer": "https://x.example"}, "go together"),
        ({"oidc_client_id": "x"}, "go together"),
        ({"oidc_issuer": "http://x.example", "oidc_client_id": "x"}, "an https address"),
        ({"oidc_issuer": "https://x.example", "oidc_client_id": "x"}, "api_key_file"),
        ({"trusted_user_header": "X User"}, "the name of a header"),
        ({"trusted_user_header": "Cookie"}, "says something else"),
        ({"trusted_user_header": "X-User"}, "api_key_file"),
        ({"add_trusted_users": True}, "set trusted_user_header"),
        ({"node_name": "../x"}, "node_name: expected up to 63 letters"),
        (
            {"default_chat_template_kwargs": "no"},
            "kwargs: expected a JSON object, got 'no' (flag --default-chat",
        ),
        (
            {"default_chat_template_kwargs": '{"tokenize": 1}'},
            "tokenize is no argument that a chat template gets",
        ),
        ({"speculative_config": "[]"}, "speculative_config: expected a JSON object, got '[]'"),
        (
            {"served_model_aliases": (" a",)},
            "no model may be called ' a': the name begins or ends with a space",
        ),
        ("prot = 1", "unknown setting 'prot' (did you mean port?)"),
        ('port = "8000"', "port: expected an integer from 0 to 65535, got '8000'"),
        ("port = true", "port: expected an integer"),
        ('api_keys = "one"', "api_keys: expected a list of non-empty strings"),
        ("sources = {}", "unknown setting 'sources'"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_wrong_flag_or_line_of_the_file_is_named_with_what_is_expected(
    tmp_path: Path, wrong: dict[str, Any] | str, expected: str
) -> None:
    is_file = isinstance(wrong, str)
    path = write(tmp_path, wrong if is_file else "")
    with pytest.raises(ConfigError) as caught:
        load(cwd=tmp_path) if is_file else load(wrong)
    said = str(caught.value)
    assert expected in said and (is_file or "\n" not in said)
    assert said.startswith(f"{path}: ") == is_file


def test_a_wrong_variable_is_named_and_an_unknown_one_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="environment: OVERTURE_PORT: expected an integer"):
        load(environ={"OVERTURE_PORT": "x"})
    load(environ={"OVERTURE_PROT": "1", "OVERTURE_URL": "for the chat client"})
    assert [record.getMessage() for record in caplog.records] == [
        "OVERTURE_PROT is no setting of this server, ignored (did you mean OVERTURE_PORT?)"
    ]


def test_the_key_in_vllms_variable_closes_the_server_where_no_setting_gives_one(tmp_path: Path) -> None:
    environ = {"VLLM_API_KEY": "of,vllm-serve"}
    assert load(environ=environ).api_keys == ("of,vllm-serve",)
    assert "of,vllm" not in load(environ=environ).describe()
    assert load({"api_keys": ("own-key-12345",)}, environ).api_keys == ("own-key-12345",)
    assert load({"operator_keys": ("own-key-12345",)}, environ).api_keys == ()
    assert not load(environ={"VLLM_API_KEY": ""}).has_api_keys


def test_adapters_are_loaded_over_http_where_the_environment_of_vllm_serve_allows_it() -> None:
    environ = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    assert load(environ=environ).allow_adapter_loading
    assert not load({"allow_adapter_loading": False}, environ).allow_adapter_loading
    assert not load(environ={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}).allow_adapter_loading


@pytest.mark.parametrize("written", ["/llm", "/llm/", "llm"])
def test_a_path_under_a_proxy_begins_with_a_slash_and_ends_with_none(written: str) -> None:
    assert load({"root_path": written}).root_path == "/llm"
    assert load({"root_path": "/"}).root_path == ""


def test_with_the_policy_of_priorities_clients_may_go_before_others_unless_it_is_ruled_out() -> None:
    assert load({"scheduling_policy": "priority"}).client_priority
    assert not load({"scheduling_policy": "priority", "client_priority": False}).client_priority
    assert not load({"scheduling_policy": "fcfs"}).client_priority


def test_an_adapter_of_a_hub_is_served_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.app import node_config

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = load({"lora_modules": ("mine=someone/adapter", f"own={tmp_path}")})
    with pytest.raises(
        InvalidRequest, match="someone/adapter is no folder here, and the hub does not give it"
    ):
        node_config(config)
    repository = tmp_path / "models--someone--adapter"
    version = repository / "snapshots" / ("a" * 40)
    version.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert node_config(config).adapters == (("mine", str(version)), ("own", str(tmp_path)))


def test_a_hubs_token_is_not_shown_among_the_engines_arguments() -> None:
    for name in ("hf_token", "hf-token", "--hf-token"):
        config = load({"engine_args": (f"{name}=hf_x1y2z3", "cpu_offload_gb=4")})
        assert "cpu_offload_gb=4" in config.describe()
        assert "x1y2z3" not in config.describe() + repr(config)
        assert config.engine_args[0].endswith("=hf_x1y2z3")


def test_a_chat_template_may_stand_in_one_line_as_with_vllm(tmp_path: Path) -> None:
    from gateway.app import node_config

    line = "{% for m in messages %}{{ m.role ~ '://' ~ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text("of a file", encoding="utf-8")
    for template, expected in ((line, line), ("own.jinja", "of a file"), (None, None)):
        config = load({"chat_template": template}, cwd=tmp_path)
        assert node_config(config).engine.chat_template == expected


def test_keys_are_never_shown(tmp_path: Path) -> None:
    config = load({"api_keys": ("sesame-open-now",)})
    assert "sesame" not in config.describe() + repr(config) + str(config)
    assert "1 set, hidden" in config.describe()
    write(tmp_path, 'api_keys = ["sesame-open-now", 3]')
    with pytest.raises(ConfigError) as caught:
        load(cwd=tmp_path)
    assert "sesame" not in str(caught.value)


def test_every_setting_of_the_engine_reaches_it_as_it_was_set(tmp_path: Path) -> None:
    from engine_bridge.settings.engine_config import EngineSettings
    from gateway.app import engine_config

    changed = {"device": "cpu", "dtype": "float16", "max_num_seqs": 7, "kv_dir": tmp_path}
    changed |= {"scheduling_policy": "fair", "adapter_policy": "lru", "kv_host_gib": 0.5}
    config = Config(**changed)  # type: ignore[arg-type]
    made = engine_config(config)
    assert {name: getattr(made, name) for name in changed} == changed
    assert all(getattr(made, name) == getattr(config, name) for name in EngineSettings.__struct_fields__)


def test_an_engine_that_serves_others_has_a_process_of_its_own_unless_told() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        assert load({"host": host}).engine == ("process" if host == "0.0.0.0" else "in-process")
        for engine in ("in-process", "process"):
            assert load({"host": host, "engine": engine}).engine == engine


def test_weights_come_from_flags_environment_and_both_forms_of_a_file(tmp_path: Path) -> None:
    write(tmp_path, 'tenant_weights = ["ada=2", "bob=0.5"]\n')
    as_list = load(cwd=tmp_path)
    write(tmp_path, "[tenant_weights]\nada = 2\nbob = 0.5\n")
    as_table = load(cwd=tmp_path)
    flags = load({"tenant_weights": ("ada=2", "bob=0.5")})
    environ = load(environ={"OVERTURE_TENANT_WEIGHTS": "ada=2, bob=0.5"})
    for config in (as_list, as_table, flags, environ):
        assert parse_weights(config.tenant_weights) == {"ada": 2.0, "bob": 0.5}
    assert parse_weights(["ada=2", "ada=2.0"]) == {"ada": 2.0}
    with pytest.raises(ValueError, match="ada has two weights"):
        parse_weights(["ada=2", "ada=3"])


WRONG = "ada|ada=|=2|ada=0|ada=-1|ada=nan|ada=inf|ada=1e999|ada=two|a da=2|a:b=2|ada=1=2|ada=.".split("|")


@pytest.mark.parametrize("entry", [*WRONG, "x" * 65 + "=1"])
def test_a_weight_of_another_form_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"tenant_weights: expected NAME=WEIGHT .*flag --tenant-weight"):
        load({"tenant_weights": (entry,)})


@given(st.integers(), st.booleans())
def test_a_client_can_wait_and_hurry_only_where_it_may(value: int, may_hurry: bool) -> None:
    low = -MAX_PRIORITY if may_hurry else 0
    if low <= value <= MAX_PRIORITY:
        assert checked_priority(value, may_hurry=may_hurry) == value
        return
    with pytest.raises(GatewayError) as raised:
        checked_priority(value, may_hurry=may_hurry)
    assert (raised.value.code, raised.value.param) == ("bad_request", "priority")
    assert f"from {low} to {MAX_PRIORITY}" in raised.value.message


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder as an older release may have left it, open to everybody."""
    folder = tmp_path / "data"
    (folder / "kv" / "0123abcd").mkdir(parents=True)
    (folder / "profiles").mkdir()
    names = "sessions.sqlite3 sessions.sqlite3-wal sessions.sqlite3-shm adapters.db lengths-1.msgpack"
    for name in (*names.split(), "kv/0123abcd/namespace.json", "kv/0123abcd/0.seg"):
        (folder / name).write_bytes(b"{}")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o775 if path.is_dir() else 0o664)
    return folder


def test_all_that_holds_conversations_becomes_private(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By way of a link to the folder, too; a link in it may point to a file of ours which others are to read."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    outside.chmod(0o644)
    (folder / "sessions.sqlite3").unlink()
    (folder / "sessions.sqlite3").symlink_to(outside)
    (tmp_path / "link").symlink_to(folder)
    config = Config(data_dir=tmp_path / "link")
    with caplog.at_level(logging.WARNING):
        config.prepare_data_dir()
    for path in (folder, *(path for path in folder.rglob("*") if not path.is_symlink())):
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
    assert mode_of(outside) == 0o644
    assert len(caplog.records) == 1 and "5 more" in caplog.text
    caplog.clear()
    config.prepare_data_dir()
    assert not caplog.records


def test_what_belongs_to_another_user_is_not_touched(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    theirs = folder / "sessions.sqlite3"
    os.chown(theirs, 12345, 12345)
    tighten(folder, folder / "kv")
    assert mode_of(theirs) == 0o664 and mode_of(folder) == 0o700
    folder.chmod(0o755)
    os.chown(folder, 12345, 12345)
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o755


def test_a_folder_that_others_use_keeps_its_rights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "somebody").mkdir()
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o775 and mode_of(folder / "sessions.sqlite3") == 0o600
    assert "use a folder of its own" in caplog.text
    (folder / "somebody").rmdir()
    folder.chmod(0o1777)
    tighten(folder, folder / "kv")
    assert mode_of(folder) == 0o1777
    folder.chmod(0o755)
    for name in ("adapter-copies", "kernels", "nodes"):
        (folder / name).mkdir(mode=0o700)
    assert tighten(folder, folder / "kv") == [folder]


def test_kv_elsewhere_is_made_private_store_by_store(folder: Path, tmp_path: Path) -> None:
    """A --kv-dir of its own may hold other things: only what is marked as a store of ours is changed."""
    elsewhere = tmp_path / "fast"
    (folder / "kv").rename(elsewhere)
    (elsewhere / "other").mkdir()
    (elsewhere / "other").chmod(0o755)
    tighten(folder, elsewhere)
    names = (".", "other", "0123abcd", "0123abcd/0.seg")
    assert [mode_of(elsewhere / name) for name in names] == [0o775, 0o755, 0o700, 0o600]
