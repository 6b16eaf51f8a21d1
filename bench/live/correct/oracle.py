"""What an answer should have been, by plain transformers in float32: no cache, no batch, adapters merged into the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Two sound float32 computations of one logit differ by less than 1e-3 here; the wrong KV of one block moves logits by 0.1 and more. Chosen between.
TIE_LOGITS = 0.02


class Oracle:
    """One model folder, loaded once; adapters are merged into a copy of its weights, one at a time.

    Args:
        overrides: fields of config.json that the server was started with in place of the folder's.
    """

    def __init__(self, folder: Path, overrides: dict[str, Any] | None = None) -> None:
        import torch
        import transformers

        torch.set_grad_enabled(False)
        config = transformers.AutoConfig.from_pretrained(folder)
        for name, value in (overrides or {}).items():
            setattr(config, name, value)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._weights = {name: weight.clone() for name, weight in self._model.named_parameters()}
        self._merged: Path | None = None

    def num_wrong(self, prompt: Sequence[int], answer: Sequence[int], adapter: Path | None = None) -> int:
        """Tokens of a greedy answer that this model would not have written there, given the tokens before them."""
        if not answer:
            return 0
        logits = self._logits([*prompt, *answer], adapter)[len(prompt) - 1 : -1]
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

    def _logits(self, ids: Sequence[int], adapter: Path | None) -> Any:
        import torch

        self._merge(adapter)
        return self._model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

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


def _column(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(ids)).unsqueeze(1)
