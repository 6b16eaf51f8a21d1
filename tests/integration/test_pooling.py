"""`/v1/embeddings`, `/rerank`, `/score`: models in processes of their own, behind the same port, keys and budgets."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)

from bench.fuzz.api import Round, Tally, Target, counted, run_round
from bench.live.correct.checkpoints import folder_of
from bench.live.correct.families import FAMILIES
from gateway.access.budgets import RequestBudgets
from gateway.app import Server

from .conftest import Gateways, SharedNode, demo_config, metrics_of, served, settle, told
from .facts import BODY, CHAT, HELLO, KEYS, MESSAGES, MODEL, Http, Log, Patch, bearer

NAME, EMBEDDINGS = "tiny-embedder", "/v1/embeddings"
SCORER, RERANK, SCORE = "tiny-scorer", "/rerank", "/score"
QUERY = {"query": "Where is Lisbon?", "documents": ["Lisbon lies on a river.", "Porto, too.", "It rains."]}
TEXTS = ["Lisbon lies on a river.", "Porto, too.", "A much longer text, which the model reads. " * 20]

# vLLM computes this model in bfloat16. Embeddings of these texts differ by a hundred times as much.
ROUNDED = 2e-3


def tiny() -> Path:
    return folder_of(next(family for family in FAMILIES if family.name == "qwen3"))


def scorer_in(folder: Path) -> Path:
    """A tiny model of BERT's kind, as most rerankers are, whose vocabulary is the letters."""
    signs = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{sign}" for sign in signs)]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder / SCORER)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=1, **sizes))
        for name, weights in model.named_parameters():
            if name.endswith("weight") and weights.dim() == 2:
                torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder / SCORER)
    return folder / SCORER


def embedder_in(folder: Path) -> Path:
    """A tiny model whose embeddings may be shortened."""
    model = folder / NAME
    model.mkdir()
    for path in tiny().iterdir():
        (model / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text()) | {"matryoshka_dimensions": [8, 16]}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    return model


def process_of(server: Server) -> psutil.Process:
    process = server.services.embeddings._process
    return psutil.Process(process.pid)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(node: SharedNode, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    settings = {"api_keys": KEYS[:1], "operator_keys": KEYS[1:], "embedding_kv_cache_gib": 0.125}
    models = {"embedding_model": str(embedder_in(folder)), "rerank_model": str(scorer_in(folder))}
    async with served(demo_config(folder / "data", **models, **settings), node) as server:
        beside = server.services.models_beside
        await settle(lambda: [model.progress.state for model in beside] == ["ready"] * 2)
        yield server
        processes = [psutil.Process(model._process.pid) for model in beside]
    assert not any(each.is_running() for each in processes), "nothing is left of them at the server's end"


@pytest_asyncio.fixture(loop_scope="session")
async def api(embedder: Server) -> AsyncIterator[Any]:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": KEYS[0], "max_retries": 0, "http_client": http}
    async with openai.AsyncOpenAI(base_url=embedder.url + "/v1", **options) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def caller(embedder: Server) -> AsyncIterator[Http]:
    async with Http(embedder.url, headers=bearer(KEYS[0])) as session:
        yield session


def by_transformers(folder: str) -> tuple[list[list[int]], list[list[float]]]:
    """The token ids of the texts, and the state of each last one behind the last layer, of length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float()
    ids = [tokenizer.encode(text) for text in TEXTS]
    with torch.inference_mode():
        states = [model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    return ids, [(state / state.norm()).tolist() for state in states]


async def test_the_sdk_gets_what_transformers_computes(api: Any, embedder: Server) -> None:
    """Of texts and of token ids, alone and in lists, in their order, as numbers and as base64."""
    ids, right = await asyncio.to_thread(by_transformers, embedder.services.embeddings.path)
    for given, at in (
        (TEXTS, [0, 1, 2]),
        (TEXTS[::-1], [2, 1, 0]),
        (TEXTS[1], [1]),
        (ids, [0, 1, 2]),
        (ids[0], [0]),
    ):
        for form in ("float", "base64", openai.NOT_GIVEN):
            made = await api.embeddings.create(model=NAME, input=given, encoding_format=form)
            assert made.model == NAME and [each.index for each in made.data] == [*range(len(at))]
            found = [
                np.frombuffer(base64.b64decode(each.embedding), np.float32)
                if isinstance(each.embedding, str)
                else each.embedding
                for each in made.data
            ]
            np.testing.assert_allclose(found, [right[place] for place in at], atol=ROUNDED)
            num_tokens = sum(len(ids[place]) for place in at)
            assert made.usage.prompt_tokens == made.usage.total_tokens == num_tokens
    nothing: Any = {"encoding_format": None, "dimensions": None, "user": None}
    assert (await api.embeddings.create(model=NAME, input=TEXTS[1], extra_body=nothing)).data
    short = (await api.embeddings.create(model=NAME, input=TEXTS, dimensions=8)).data
    head = np.array(right)[:, :8]
    np.testing.assert_allclose(
        [each.embedding for each in short],
        head / np.linalg.norm(head, axis=1, keepdims=True),
        atol=ROUNDED,
    )


def scores_by_transformers(folder: str) -> tuple[list[list[int]], list[float]]:
    """The token ids of the query with each text, and what the model's head makes of both, between 0 and 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float()
    pairs = [tokenizer(QUERY["query"], text, return_tensors="pt") for text in QUERY["documents"]]
    with torch.inference_mode():
        scores = [torch.sigmoid(model(**pair).logits).item() for pair in pairs]
    return [pair["input_ids"][0].tolist() for pair in pairs], scores


async def test_texts_are_ordered_by_the_scores_that_transformers_computes(
    caller: Http, embedder: Server
) -> None:
    """By all names of both calls, and the texts of a call for scores by each pair of their names."""
    ids, right = await asyncio.to_thread(scores_by_transformers, embedder.services.reranker.path)
    assert max(right) - min(right) > 10 * ROUNDED
    order = sorted(range(3), key=lambda place: -right[place])
    for path in (RERANK, "/v1/rerank", "/v2/rerank"):
        made = await told(caller.post(path, json=QUERY | {"top_n": 2, "return_documents": None}))
        assert made["model"] == SCORER and [each["index"] for each in made["results"]] == order[:2]
        assert made["results"][0]["document"]["text"] == QUERY["documents"][order[0]]
        scores = [each["relevance_score"] for each in made["results"]]
        np.testing.assert_allclose(scores, [right[place] for place in order[:2]], atol=ROUNDED)
        assert made["usage"]["prompt_tokens"] == sum(map(len, ids))
    query, texts = QUERY.values()
    for first, second in (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ):
        for path, given in ((SCORE, query), ("/v1/score", [query] * 3)):
            made = await told(caller.post(path, json={first: given, second: texts, "model": SCORER}))
            np.testing.assert_allclose([each["score"] for each in made["data"]], right, atol=ROUNDED)


async def test_without_a_model_for_scores_the_embedding_model_compares_embeddings(
    api: Any, caller: Http, embedder: Server, monkeypatch: Patch
) -> None:
    made = (await api.embeddings.create(model=NAME, input=[QUERY["query"], *QUERY["documents"]])).data
    query, *texts = (each.embedding for each in made)
    monkeypatch.setattr(embedder.services, "reranker", None)
    scores = (
        await told(caller.post(SCORE, json={"queries": QUERY["query"], "documents": QUERY["documents"]}))
    )["data"]
    np.testing.assert_allclose([each["score"] for each in scores], np.array(texts) @ query, atol=ROUNDED)


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, ""),
        (RERANK, {"query": 1, "documents": ["a"]}, "query"),
        (RERANK, {"query": "a", "documents": ["a"] * 2049}, "max_embedding_inputs"),
        (RERANK, {"query": "a " * 2_000_000, "documents": ["a"]}, "max_prompt_chars"),
        (RERANK, {"query": "a", "documents": ["b " * 1_000]}, "context length"),
        (RERANK, {"query": "a", "documents": [{"content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]}, "texts only"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, ""),
        (RERANK, {"query": "a " * 600, "documents": ["b"], "max_tokens_per_doc": 2}, "context length is 512"),
        (RERANK, {"query": "a" * 8_192, "documents": ["b"] * 2048}, "max_body_bytes"),
        (RERANK, {"query": "a", "documents": ["b"] * 2048, "padding": "max_length"}, "max_body_bytes"),
        (EMBEDDINGS, {"input": ["b"] * 2048, "padding": "max_length"}, "max_body_bytes"),
        (RERANK, {"query": "a" * 200, "documents": ["b"] * 2048, "instruction": "c" * 8_100}, "max_body_bytes"),
        (RERANK, QUERY | {"chat_template_kwargs": {"instruction": "c" * 8_200}}, "max_prompt_chars"),
        (RERANK, {"query": "a", "documents": [{"text": "b"}]}, "as a string"),
        (SCORE, {"text_1": "a"}, "missing"),
        (SCORE, [], ""),
    ],
    ids=range(18),
)  # fmt: skip
async def test_what_is_wrong_with_a_call_for_scores_is_said(
    path: str, body: Any, word: str, caller: Http
) -> None:
    error = (await told(caller.post(path, json=body), 400))["error"]
    assert error["type"] == "invalid_request_error" and word in error["message"] + str(error["param"])


async def test_a_refused_call_leaves_off_reading_its_other_texts(caller: Http, embedder: Server) -> None:
    """One thread reads the texts of all calls: others would wait for them."""
    process = psutil.Process(embedder.services.reranker._process.pid)
    too_long = {"query": "a " * 4_000, "documents": ["b"] * 2_000}
    await told(caller.post(RERANK, json=too_long), 400)
    before_s = process.cpu_times().user
    await told(caller.post(RERANK, json=QUERY))
    assert process.cpu_times().user - before_s < 1


async def test_the_texts_of_one_key_are_read_among_those_of_others(caller: Http, embedder: Server) -> None:
    """The long call ends with its last text, which is refused: before that somebody else's was answered."""
    process = psutil.Process(embedder.services.reranker._process.pid)
    long = {"query": "a", "documents": ["b " * 200] * 2_000 + ["b " * 600]}
    before_s = process.cpu_times().user
    async with Http(embedder.url, headers=bearer(KEYS[1])) as other:
        refused = asyncio.create_task(told(caller.post(RERANK, json=long), 400))
        await settle(lambda: process.cpu_times().user - before_s > 0.1)
        await told(other.post(RERANK, json=QUERY))
        assert not refused.done()
        await refused


async def test_the_chat_model_comes_first_and_each_model_refuses_the_others_calls(
    api: Any, caller: Http, embedder: Server
) -> None:
    names = [model.id async for model in api.models.list()]
    assert names[0] == MODEL and names[-2:] == [NAME, SCORER]
    card = await told(caller.get(f"/v1/models/{NAME}"))
    assert card["root"] == NAME and card["max_model_len"] == embedder.services.embeddings.max_model_len > 0
    claudes = await told(caller.get("/v1/models", headers={"anthropic-version": "2023-06-01"}))
    assert NAME not in json.dumps(claudes) and SCORER not in json.dumps(claudes)
    for path, body in ((CHAT, BODY), (MESSAGES, BODY), ("/tokenize", {"prompt": "a"})):
        for name, does in ((NAME, EMBEDDINGS), (SCORER, RERANK)):
            error = (await told(caller.post(path, json=body | {"model": name}), 400))["error"]
            assert MODEL in error["message"] and does in error["message"]
    error = (await told(caller.post(RERANK, json=QUERY | {"model": NAME}), 400))["error"]
    assert error["param"] == "model" and SCORER in error["message"]
    for name, status in ((MODEL, 400), (SCORER, 400), ("shout", 400), ("nope", 404)):
        with pytest.raises(openai.APIStatusError) as raised:
            await api.embeddings.create(model=name, input="a")
        assert raised.value.status_code == status and raised.value.param == "model"
        assert f"`{NAME}`" in raised.value.message or NAME in raised.value.message
    assert (await told(caller.post(EMBEDDINGS, json={"input": "a"})))["model"] == NAME, "none need be named"


async def test_the_route_answers_as_the_document_says_whatever_is_sent(embedder: Server) -> None:
    target, tally = Target(embedder.url, KEYS[1]), Tally()
    paths = [word for path in (EMBEDDINGS, RERANK, SCORE) for word in ("--include-path", path)]
    step = Round("embeddings", 10, "examples,coverage,fuzzing", tuple(paths))
    tally.add_report(await asyncio.to_thread(run_round, target, step, 1))
    seen = await asyncio.to_thread(counted, target)
    assert all(seen[path, status] for path in (EMBEDDINGS, RERANK, SCORE) for status in (200, 400))
    assert not tally.failures
    assert not [entry for entry in seen if entry[1] >= 500]


async def test_without_an_embedding_model_the_error_names_the_setting(http: Http) -> None:
    error = (await told(http.post(EMBEDDINGS, json={"input": "a"}), 404))["error"]
    assert "--embedding-model" in error["message"] and error["code"] == "not_found"
    error = (await told(http.post("/v2/rerank", json=QUERY), 404))["error"]
    assert "--rerank-model" in error["message"] and error["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"input": ["a"] * 100_000}, 400, "max_embedding_inputs"),
        ({"input": [[1]] * 2049}, 400, "max_embedding_inputs"),
        ({"input": [1] * 400_000}, 400, "max_json_values"),
        ({"input": [10**6]}, 400, "vocabulary"),
        ({"input": [-1]}, 400, ""),
        ({"input": [2**70]}, 400, ""),
        ({"input": []}, 400, ""),
        ({"input": [[]]}, 400, ""),
        ({"input": ""}, 400, ""),
        ({"input": "a " * 2_000_000}, 400, "max_prompt_chars"),
        ({"input": [4] * 100_000}, 400, "context length"),
        ({"input": None}, 400, "input"),
        ({"input": {"text": "a"}}, 400, "input"),
        ({"input": ["a", 1]}, 400, "input"),
        ({}, 400, "input"),
        ([], 400, ""),
        ({"input": "a", "encoding_format": "bytes"}, 400, "encoding_format"),
        ({"input": "a", "encoding_format": ["float"]}, 400, "encoding_format"),
        ({"input": "a", "dimensions": 5}, 400, "Matryoshka"),
        ({"input": "a", "dimensions": -1}, 400, ""),
        ({"input": "a", "model": 7}, 400, "model"),
        ({"input": "a", "truncate_prompt_tokens": 10**9}, 400, "truncat"),
    ],
    ids=range(22),
)
async def test_what_is_wrong_with_a_call_is_said_and_harms_no_other(
    body: Any, status: int, word: str, caller: Http
) -> None:
    good, bad = await asyncio.gather(
        told(caller.post(EMBEDDINGS, json={"input": "a"})),
        told(caller.post(EMBEDDINGS, json=body), status),
    )
    assert len(good["data"]) == 1
    assert bad["error"]["type"] == "invalid_request_error" and bad["error"]["message"]
    assert word in bad["error"]["message"] + str(bad["error"]["param"])


async def test_a_call_needs_a_key_and_a_place_among_its_owners_calls(
    caller: Http, embedder: Server, monkeypatch: Patch
) -> None:
    services = embedder.services
    async with Http(embedder.url) as stranger:
        await told(stranger.post(EMBEDDINGS, json={"input": "a"}), 401)
    async with Http(embedder.url, headers=bearer(KEYS[1])) as operator:
        before = await metrics_of(operator, "overture_embedding")
        usage = (await told(caller.post(EMBEDDINGS, json={"input": TEXTS})))["usage"]
        after = await metrics_of(operator, "overture_embedding")
    tokens, calls = "overture_embedding_prompt_tokens_total", "overture_embedding_seconds_count"
    assert after[tokens] - before[tokens] == usage["prompt_tokens"] and after[calls] - before[calls] == 1
    monkeypatch.setattr(services, "budgets", RequestBudgets(services.metrics, per_s=0.01, max_concurrent=1))
    owner = services.keys.authenticate(KEYS[0]).owner
    with services.budgets.enter(owner):
        await told(caller.post(EMBEDDINGS, json={"input": "a"}), 429)
    await told(caller.post(EMBEDDINGS, json={"input": "a"}), 429)


async def test_a_killed_process_costs_a_retry_and_no_chat(caller: Http, embedder: Server) -> None:
    model = embedder.services.embeddings
    dead = process_of(embedder)
    calling = asyncio.create_task(caller.post(EMBEDDINGS, json={"input": TEXTS * 300}))
    await settle(lambda: model._link._calls)
    dead.send_signal(signal.SIGKILL)
    async with await calling as lost:
        assert lost.status == 503 and int(lost.headers["Retry-After"]) > 0
    error = (await told(caller.post(EMBEDDINGS, json={"input": "a"}), 503))["error"]
    assert "again" in error["message"] and error["code"] == "starting"
    assert (await told(caller.post(CHAT, json=BODY)))["choices"][0]["message"]["content"]
    await settle(lambda: model.progress.state == "ready")
    assert process_of(embedder).pid != dead.pid
    await told(caller.post(EMBEDDINGS, json={"input": "a"}))


async def test_a_model_that_cannot_be_loaded_turns_embeddings_off_and_nothing_else(
    gateways: Gateways, caplog: Log
) -> None:
    """Its process is killed, as the kernel does where memory runs out; what a fault of the model's files is told as, test_models.py has."""
    server = await gateways(embedding_model=str(tiny()), embedding_model_name="broken")
    model = server.services.embeddings
    (await settle(lambda: model._process)).kill()
    await settle(lambda: model.progress.state == "closed")
    line = next(each.message for each in caplog.records if "embeddings are off" in each.message)
    assert "broken" in line and "SIGKILL" in line
    async with Http(server.url) as http:
        error = (await told(http.post(EMBEDDINGS, json={"input": "a"}), 503))["error"]
        assert "log says why" in error["message"]
        await told(http.post(CHAT, json={"model": MODEL, "messages": HELLO, "max_tokens": 2}))
