"""What an answer should have been, by plain transformers in float32: no cache, no batch, adapters merged into the weights.

Where transformers cannot compute with a model's weights, it is what vLLM itself computes, with no prefix cache and one request at a time.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.live.correct.checkpoints import model_class
from bench.live.correct.pictures import Sight, as_image

# Two sound float32 computations of one logit differ by less than 1e-3 here; the wrong KV of one block moves logits by 0.1 and more. Chosen between.
TIE_LOGITS = 0.02
# Computing in bfloat16 rounds logits of these sizes to a 32nd, a 16th or an eighth. Chosen above.
TIE_LOGITS_BFLOAT16 = 0.13


class Oracle:
    """One model folder, loaded once; adapters are merged into a copy of its weights, one at a time.

    Args:
        overrides: fields of config.json that the server was started with in place of the folder's.
    """

    def __init__(self, folder: Path, overrides: Mapping[str, Any] = {}) -> None:
        import torch
        import transformers

        torch.set_grad_enabled(False)
        config = transformers.AutoConfig.from_pretrained(folder)
        for name, value in overrides.items():
            setattr(config, name, value)
        self._model = (
            model_class(config)
            .from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
            .eval()
        )
        self._folder = folder
        self._weights = {name: weight.clone() for name, weight in self._model.named_parameters()}
        self._merged: Path | None = None

    def num_wrong(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        adapter: Path | None = None,
        pictures: Sequence[bytes] = (),
    ) -> int:
        """Tokens of a greedy answer that this model would not have written there, given the tokens and the pictures before them."""
        if not answer:
            return 0
        logits = self._logits([*prompt, *answer], adapter, pictures)[len(prompt) - 1 : -1]
        written = logits.gather(1, _column(answer))[:, 0]
        return int((logits.max(1).values - written > TIE_LOGITS).sum())

    def next_token(self, ids: Sequence[int]) -> int:
        """Return the token that the model without adapters writes next."""
        return int(self._logits(ids, None)[-1].argmax())

    def logprobs(self, ids: Sequence[int], adapter: Path | None = None) -> list[float]:
        """Log probabilities of all of `ids` but the first."""
        logits = self._logits(ids, adapter)[:-1].log_softmax(1)
        found: list[float] = logits.gather(1, _column(ids[1:]))[:, 0].tolist()
        return found

    def _logits(self, ids: Sequence[int], adapter: Path | None, pictures: Sequence[bytes] = ()) -> Any:
        import torch

        self._merge(adapter)
        seen = self._seen(ids, pictures) if pictures else {}
        return self._model(torch.tensor([list(ids)]), use_cache=False, **seen).logits[0].float()

    def _seen(self, ids: Sequence[int], pictures: Sequence[bytes]) -> dict[str, Any]:
        """Return what the model is given beside the ids so that it sees these PNGs."""
        import torch
        import transformers

        processor = transformers.AutoImageProcessor.from_pretrained(self._folder)
        seen = dict(processor([as_image(each) for each in pictures], return_tensors="pt"))
        config, takes = self._model.config, inspect.signature(self._model.forward).parameters
        token = getattr(config, "image_token_id", None) or config.image_token_index
        types = (torch.tensor([list(ids)]) == token).int()
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in takes:
                seen[name] = types
        return {name: value for name, value in seen.items() if name in takes}

    def _merge(self, adapter: Path | None) -> None:
        if adapter == self._merged:
            return
        parameters = dict(self._model.named_parameters())
        for name, weight in self._weights.items():
            parameters[name].copy_(weight)
        if adapter is not None:
            from safetensors.torch import load_file

            config = json.loads((adapter / "adapter_config.json").read_text())
            scale = config["lora_alpha"] / config["r"]
            tensors = load_file(adapter / "adapter_model.safetensors")
            for name, shrink in tensors.items():
                if ".lora_A." in name:
                    path = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                    parameters[path] += scale * tensors[name.replace(".lora_A.", ".lora_B.")] @ shrink
        self._merged = adapter


class StockOracle:
    """vLLM's own engine with one model folder, in this process. On a CPU it computes adapters with our layers, as its own take seconds a step.

    Args:
        sight: how the model reads pictures; None where it reads none.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        max_model_len: int,
        *,
        has_adapters: bool,
        sight: Sight | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        from engine_bridge.driver.corrections import logits_rows
        from engine_bridge.driver.in_process import runner_of
        from engine_bridge.driver.lora import lora

        if has_adapters:
            lora.install()
        self._ids: dict[Path, int] = {}
        self._sight = sight
        self._tie_logits = TIE_LOGITS if dtype == "float32" else TIE_LOGITS_BFLOAT16
        self._llm = LLM(
            model=str(folder),
            dtype=dtype,
            enforce_eager=True,
            enable_prefix_caching=False,
            **({"enable_lora": True, "max_lora_rank": 8} if has_adapters else {}),
            max_model_len=max_model_len,
            max_num_seqs=1,
            kv_cache_memory_bytes=64 << 20,
            kv_cache_dtype=kv_cache_dtype,
            disable_log_stats=True,
        )
        if has_adapters:
            logits_rows.watch(runner_of(self._llm.llm_engine))

    def num_wrong(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        adapter: Path | None = None,
        pictures: Sequence[bytes] = (),
    ) -> int:
        """Tokens of a greedy answer that this model would not have written there, given the tokens and the pictures before them."""
        if not answer:
            return 0
        found = self._of_each([*prompt, *answer], adapter, pictures)[len(prompt) :]
        return sum(
            max(each.values()) - each[token] > self._tie_logits
            for each, token in zip(found, answer, strict=True)
        )

    def logprobs(self, ids: Sequence[int], adapter: Path | None = None) -> list[float]:
        """Log probabilities of all of `ids` but the first."""
        found = self._of_each(ids, adapter)[1:]
        return [each[token] for each, token in zip(found, ids[1:], strict=True)]

    def _of_each(
        self, ids: Sequence[int], adapter: Path | None, pictures: Sequence[bytes] = ()
    ) -> list[dict[int, float]]:
        """Return, for each of `ids`, the log probabilities of itself and of the best token there; of the first one nothing."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        lora = None
        if adapter is not None:
            lora = LoRARequest(adapter.name, self._ids.setdefault(adapter, len(self._ids) + 1), str(adapter))
        prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
        if self._sight is not None and pictures:
            prompt = {"prompt_token_ids": self._sight.collapsed(ids)}
            prompt["multi_modal_data"] = {"image": [as_image(each) for each in pictures]}
        (output,) = self._llm.generate(prompt, asked, use_tqdm=False, lora_request=lora)
        found = output.prompt_logprobs or []
        return [{token: of.logprob for token, of in (each or {}).items()} for each in found]


def _column(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(ids)).unsqueeze(1)
