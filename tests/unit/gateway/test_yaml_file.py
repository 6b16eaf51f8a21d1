"""The YAML file of flags that `vllm serve` takes by --config."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway import cli


def run(*argv: str) -> Result:
    """Run `overture config`."""
    return CliRunner().invoke(cli.cli, ["config", *argv])


def shown(*argv: str) -> str:
    """What `overture config` says of a command line."""
    result = run(*argv)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_config_file_of_vllm_serve_is_taken_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        """
        model: demo/model
        max_model_len: 2k
        port: 8123
        served-model-name: [a, b]
        enforce-eager: true
        enable-prefix-caching: false
        allowed-origins: []
        compilation-config: {mode: 0}
        api-key: [secret]
        """,
        encoding="utf-8",
    )
    said = shown("--port", "8124", "--config", str(file), "--api-key", "x", "--api-key", "y")
    for expected in (
        r"model +\S*demo/model +flag",
        r"max_model_len +2000 ",
        r"port +8124 ",
        r"served_model_name +a ",
        r"served_model_aliases +b ",
        r"enforce_eager +true ",
        r"enable_prefix_caching +false ",
        r'engine_args +compilation_config=\{"mode": 0\} ',
        r"api_keys +2 set",
    ):
        assert re.search(f"^{expected}", said, re.MULTILINE), expected
    assert re.search(r"^port +8123 ", shown("demo/model", f"--config={file}"), re.MULTILINE)
    file.write_text("served-model-name: [a, b]\nquantization: null\n", encoding="utf-8")
    said = shown("--config", str(file))
    assert re.search(r"served_model_aliases +b ", said) and re.search(r"quantization +unset", said)
    for text, why in (("[1]", "holds no flags"), ("a: [", "is no YAML in line 1")):
        file.write_text(text, encoding="utf-8")
        assert why in run("--config", str(file)).stderr
    assert "cannot read" in run("--config", str(tmp_path / "none.yml")).stderr


def test_a_list_of_the_file_ends_with_it_and_a_model_behind_it_stays_the_model(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "ignore-patterns: [x, -y]\napi-key: [-zzz, yyy]\nserved-model-name: [a, b]\n", encoding="utf-8"
    )
    said = shown("--config", str(file), "demo/model")
    for expected in (
        r"model +\S*demo/model +flag",
        r"served_model_name +a ",
        r"served_model_aliases +b ",
        r"api_keys +2 set",
        r'engine_args +ignore_patterns=\["x", "-y"\] ',
    ):
        assert re.search(f"^{expected}", said, re.MULTILINE), expected


@pytest.mark.parametrize(
    "text",
    [
        "api-key: [zzz",
        "api-key: [zzz, null]",
        "api-key: [[zzz]]",
        "? [zzz]\n: b",
        "port: 2020-99-99",
        "hf-overrides: {a: 2020-01-01}",
        "hf-overrides: &x {zzz: *x}",
        "served-model-name: &x [*x]",
        "port: 0x" + "f" * 5000,
        "api-key: !!python/object:zzz {}",
        "\x00",
        "[" * 5000,
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_without_its_values(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    done = run("--config", str(file))
    assert done.exit_code == 2 and f"--config: {file}" in done.stderr
    assert "=zzz" not in done.stderr and "[zzz" not in done.stderr
