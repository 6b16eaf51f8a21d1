"""`lm_eval`, the command: tasks of ours scored by completions, with the server's own tokenizer, and by chat completions."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from harness import MODEL, V1_URL, call_all, empty_home, run_command

CHOICES = {"choices": ["sunny", "rainy"], "label": 0}
PLACES = [
    CHOICES | {"prompt": f"What is the weather like in {city}?", "place": city}
    for city in ("Paris", "Rome", "Oslo")
]
COMMON = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "places.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{prompt}}",
}
ANSWERED = {"metric": "bypass", "aggregation": "bypass", "higher_is_better": True}
TASKS = {
    "chosen": COMMON
    | {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
    | {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]},
    "likely": COMMON
    | {"output_type": "loglikelihood", "doc_to_target": " It is sunny in {{place}}."}
    | {"metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]},
    "written": COMMON
    | {"output_type": "generate_until", "doc_to_target": "{{place}}"}
    | {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0}}
    | {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]},
}


def evaluate(task, model, endpoint, *more, **arguments):
    """The task's metrics, and what was answered to each of its questions."""
    usual = {"base_url": f"{V1_URL}/{endpoint}", "num_concurrent": 2, "max_retries": 1}
    arguments = {"model": MODEL} | usual | arguments
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    output = f"--output_path=results-{task}-{model}"
    asked = (f"--model={model}", "--model_args", given, "--tasks", task)
    run_command("lm_eval", "run", *asked, "--include_path=.", output, "--log_samples", *more)
    [results] = Path(output.partition("=")[2]).rglob("results_*.json")
    [samples] = Path(output.partition("=")[2]).rglob("samples_*.jsonl")
    answers = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    assert len(answers) == len(PLACES)
    return json.loads(results.read_text())["results"][task], answers


def completions(task):
    return evaluate(task, "local-completions", "completions", tokenizer_backend="remote")


def multiple_choice():
    metrics, answers = completions("chosen")
    assert 0 <= metrics["acc,none"] <= 1
    assert all(float(choice[0][0]) < 0 for choices in answers for choice in choices), answers


def loglikelihood():
    metrics, _ = completions("likely")
    assert math.isfinite(metrics["perplexity,none"]) and metrics["perplexity,none"] > 1


def generate_until_by_chat_completions():
    _, answers = evaluate("written", "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert all(written.strip() for [[written]] in answers), answers


if __name__ == "__main__":
    with empty_home() as home:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        Path(home, "places.jsonl").write_text("".join(json.dumps(place) + "\n" for place in PLACES))
        for name, task in TASKS.items():
            Path(home, f"{name}.yaml").write_text(json.dumps({"task": name} | task))  # JSON is YAML
        call_all()
