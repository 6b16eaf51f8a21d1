"""Settings: which source wins, and what a mistake is answered with."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR, SETTINGS, Config, ConfigError
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


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    write(tmp_path, "port = 1\nmax_num_seqs = 2\nmax_loras = 3\n")
    environ = {"OVERTURE_PORT": "10", "OVERTURE_MAX_NUM_SEQS": "20"}
    config = load({"port": "100"}, environ, cwd=tmp_path)
    assert (config.port, config.max_num_seqs, config.max_loras, config.max_lora_rank) == (100, 20, 3, 128)
    assert config.sources["port"] == "flag --port"
    assert config.sources["max_num_seqs"] == "env OVERTURE_MAX_NUM_SEQS"
    assert config.sources["max_loras"] == str(tmp_path / "overture.toml")
    assert "max_lora_rank" not in config.sources


def test_flags_that_were_not_given_change_nothing() -> None:
    assert load({"port": None, "api_keys": (), "allow_adapter_loading": None}).sources == {}


def test_an_empty_environment_variable_is_not_set() -> None:
    assert load(environ={"OVERTURE_PORT": ""}).port == 8000


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_words_for_true(word: str) -> None:
    assert load(environ={"OVERTURE_ALLOW_ADAPTER_LOADING": word}).allow_adapter_loading is True


@pytest.mark.parametrize("word", ["0", "false", "No", "off"])
def test_words_for_false(word: str) -> None:
    assert load(environ={"OVERTURE_ALLOW_ADAPTER_LOADING": word}).allow_adapter_loading is False


def test_lists_come_as_toml_lists_repeated_flags_or_commas(tmp_path: Path) -> None:
    write(tmp_path, 'cors_origins = ["https://a.example"]\n')
    assert load(cwd=tmp_path).cors_origins == ("https://a.example",)
    assert (
        load({"cors_origins": ("https://a.example", "https://b.example")}).cors_origins[1]
        == "https://b.example"
    )
    environ = {"OVERTURE_API_KEYS": "one-key, another-key"}
    assert load(environ=environ).api_keys == ("one-key", "another-key")


def test_another_model_brings_its_own_name_and_no_adapters(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-8B").mkdir()
    config = load({"model": "Qwen3-8B"}, cwd=tmp_path)
    assert config.model == str(tmp_path / "Qwen3-8B")
    assert (config.served_model_name, config.adapters_dir) == ("Qwen3-8B", None)
    assert load({"model": "org/from-a-hub"}).model == "org/from-a-hub"
    assert load({"model": "org/from-a-hub"}).served_model_name == "from-a-hub"


def test_relative_paths_in_a_file_count_from_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "keys.txt").touch()
    path = write(folder, 'api_key_file = "keys.txt"\ndata_dir = "state"\n')
    config = load(config_file=path, cwd=tmp_path)
    assert (config.api_key_file, config.data_dir) == (folder / "keys.txt", folder / "state")


def test_the_data_folder_follows_xdg() -> None:
    assert load(environ={"XDG_DATA_HOME": "/srv/x"}).data_dir == Path("/srv/x/overture")
    assert load(environ={"XDG_DATA_HOME": "relative"}).data_dir == Path.home() / ".local/share/overture"


def test_the_data_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    config = load({"data_dir": "new/data"}, cwd=tmp_path)
    assert stat.S_IMODE(config.prepare_data_dir().stat().st_mode) == 0o700
    config.prepare_data_dir()


def test_a_data_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data_dir: cannot make"):
        load({"data_dir": "file/data"}, cwd=tmp_path).prepare_data_dir()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"port": "many"}, "--port: expected an integer from 0 to 65535, got 'many'"),
        ({"port": "65536"}, "--port: expected an integer from 0 to 65535, got '65536'"),
        ({"device": "tpu"}, "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"kv_cache_gib": "0"}, "--kv-cache-gib: expected a number, more than 0, got '0'"),
        ({"kv_cache_gib": "nan"}, "--kv-cache-gib: expected a number, more than 0, got 'nan'"),
        ({"gpu_memory_utilization": "1.5"}, "expected a number, more than 0 and at most 1"),
        ({"max_model_len": "-1"}, "--max-model-len: expected an integer, at least 1, got '-1'"),
        ({"host": ""}, "--host: expected a non-empty string"),
        ({"data_dir": ""}, "--data-dir: expected a path"),
        ({"adapter_host_gib": "0"}, "--adapter-host-gib"),
        ({"chat_template": "gone.jinja"}, "chat_template: there is no file /nonexistent/gone.jinja"),
        ({"api_key_file": "gone"}, "api_key_file: there is no file"),
        ({"adapters_dir": "gone"}, "adapters_dir: there is no folder"),
        ({"model": "./gone"}, "model: there is no folder"),
        ({"prot": "1"}, "did you mean port"),
        ({"nodes": "0"}, "nodes: 0 is for a cluster that others join"),
        ({"ray_address": "somewhere"}, "ray_address: expected HOST:PORT, got 'somewhere'"),
        ({"cluster_host": "0.0.0.0"}, "cluster_host: name one address of this machine"),
        ({"cluster_host": "gateway.example"}, "cluster_host: 'gateway.example' does not appear to be"),
        ({"cluster_host": "10.0.0.1"}, "nodes on 10.0.0.1 need TLS: give --cluster-cert and --cluster-key"),
        ({"cluster_cert": __file__}, "cluster_cert and cluster_key go together"),
        ({"cluster_cert": "gone", "cluster_key": "gone"}, "cluster_cert: there is no file"),
        ({"node_name": "../x"}, "node_name: expected up to 63 letters"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_expected(flags: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot = 1", "unknown setting 'prot' (did you mean port?)"),
        ('port = "8000"', "port: expected an integer from 0 to 65535, got '8000'"),
        ("port = true", "port: expected an integer"),
        ('api_keys = "one"', "api_keys: expected a list of non-empty strings"),
        ("[server]\nport = 1", "unknown setting 'server'"),
        ("sources = {}", "unknown setting 'sources'"),
        ("port = ", "not valid TOML"),
    ],
)
def test_a_wrong_line_in_the_file_is_named_with_what_is_expected(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(cwd=tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)


def test_whole_numbers_do_for_settings_in_fractions(tmp_path: Path) -> None:
    write(tmp_path, "kv_cache_gib = 4\n")
    assert load(cwd=tmp_path).kv_cache_gib == 4.0


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    for options in ({"config_file": "gone.toml"}, {"environ": {"OVERTURE_CONFIG": "gone.toml"}}):
        with pytest.raises(ConfigError, match=r"gone\.toml: cannot read the config file"):
            load(cwd=tmp_path, **options)  # type: ignore[arg-type]


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "overture.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(cwd=tmp_path)


def test_a_wrong_variable_is_named_and_an_unknown_one_is_only_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match="environment: OVERTURE_PORT: expected an integer"):
        load(environ={"OVERTURE_PORT": "x"})
    load(environ={"OVERTURE_PROT": "1", "OVERTURE_URL": "for the chat client"})
    assert [record.getMessage() for record in caplog.records] == [
        "OVERTURE_PROT is no setting of this server, ignored (did you mean OVERTURE_PORT?)"
    ]


def test_keys_are_never_shown(tmp_path: Path) -> None:
    config = load({"api_keys": ("sesame-open-now",)})
    assert "sesame" not in config.describe() + repr(config) + str(config)
    assert "1 set, hidden" in config.describe()
    write(tmp_path, 'api_keys = ["sesame-open-now", 3]')
    with pytest.raises(ConfigError) as caught:
        load(cwd=tmp_path)
    assert "sesame" not in str(caught.value)


def test_every_setting_is_described_with_its_source() -> None:
    lines = load({"port": "9000"}).describe().splitlines()
    assert [line.split()[0] for line in lines] == [setting.name for setting in SETTINGS]
    assert any(line.split() == ["port", "9000", "flag", "--port"] for line in lines)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load({"host": host}).warnings() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gateway.example"])
def test_an_open_server_without_a_key_is_warned_about(host: str) -> None:
    assert "no API key" in load({"host": host}).warnings()[0]
    assert load({"host": host, "api_keys": ("a-key",)}).warnings() == []


def test_the_repository_has_every_file_that_the_paths_name() -> None:
    assert DEMO_MODEL_DIR.parent.is_dir()
    assert os.path.isabs(DEMO_MODEL_DIR)


def test_a_proxy_that_is_no_address_is_named() -> None:
    assert load({"trusted_proxies": ("10.0.0.0/8", "::1")}).trusted_proxies == ("10.0.0.0/8", "::1")
    with pytest.raises(ConfigError, match=r"trusted_proxies: .*nginx.*flag --trusted-proxy"):
        load({"trusted_proxies": ("nginx",)})


def test_every_setting_of_the_engine_reaches_it_as_it_was_set(tmp_path: Path) -> None:
    from engine_bridge.settings.engine_config import EngineSettings
    from gateway.app import engine_config

    changed = {
        "device": "cpu",
        "dtype": "float16",
        "max_num_seqs": 7,
        "kv_dir": tmp_path,
        "scheduling_policy": "fair",
        "decision_log": tmp_path / "log",
        "adapter_policy": "lru",
        "kv_host_gib": 0.5,
    }
    config = Config(**changed)  # type: ignore[arg-type]
    made = engine_config(config)
    assert {name: getattr(made, name) for name in changed} == changed
    assert all(getattr(made, name) == getattr(config, name) for name in EngineSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("flags", "is_cluster"),
    [
        ({}, False),
        ({"nodes": "1"}, False),
        ({"nodes": "2"}, True),
        ({"ray_address": "10.0.0.1:6379"}, True),
        ({"cluster_host": "10.0.0.1", "cluster_cert": __file__, "cluster_key": __file__}, True),
    ],
)
def test_one_node_that_nobody_joins_needs_no_cluster(flags: dict[str, str], is_cluster: bool) -> None:
    assert load(flags).is_cluster is is_cluster


@pytest.mark.parametrize(
    ("host", "engine", "place"),
    [
        ("127.0.0.1", "auto", "in-process"),
        ("localhost", "auto", "in-process"),
        ("::1", "auto", "in-process"),
        ("0.0.0.0", "auto", "process"),
        ("0.0.0.0", "in-process", "in-process"),
        ("127.0.0.1", "process", "process"),
    ],
)
def test_an_engine_that_serves_others_has_a_process_of_its_own_unless_told(
    host: str, engine: str, place: str
) -> None:
    assert load({"host": host, "engine": engine}).engine == place
