"""`overture doctor` as a user runs it: by import of the vLLM that is installed, or by the source of another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gateway.settings.config import DEMO_MODEL_DIR
from tests.conftest import ROOT


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "doctor", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


def test_this_machine_can_serve_and_one_with_another_vllm_cannot(tmp_path: Path) -> None:
    model = tmp_path / "model"  # what it can have is known without weights
    model.mkdir()
    described = {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(described))
    elsewhere = ("--engine-arg", "load_format=dummy", "--engine-arg", f"tokenizer={DEMO_MODEL_DIR}")
    flags = ("--json", "--data-dir", str(tmp_path / "data"), "--max-step-ms", "0", "--model", str(model))
    done = doctor(*flags, *elsewhere)
    found = json.loads(done.stdout)
    assert (done.returncode, found["can_serve"], found["problems"]) == (0, True, []), done.stderr
    assert found["versions"]["vllm"] == f"{found['vllm']}" and found["machine"]["num_cores"] > 0
    assert sum(feature["num_names"] for feature in found["features"]) > 300
    assert not any(feature["moved"] for feature in found["features"])
    assert {"what": "short steps", "why": "--max-step-ms 0"} in found["off"]
    assert {"what": "adapters", "why": "vLLM has no LoRA for StableLmForCausalLM"} in found["off"]
    assert not (tmp_path / "data").exists()

    other = tmp_path / "vllm"
    other.mkdir()
    (other / "__init__.py").write_text("")
    done = doctor("--data-dir", str(tmp_path / "data"), "--model", str(model), "--vllm-source", str(other))
    assert done.returncode == 1 and f"{model} has no weights (*.safetensors)" in done.stdout
    assert "vllm.v1.engine.llm_engine.LLMEngine: it cannot be imported: ModuleNotFoundError" in done.stdout
    assert "This machine cannot serve:" in done.stdout and "what to do: install the vLLM" in done.stdout
