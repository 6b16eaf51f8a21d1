"""The network, its optimizer and its LoRA adapters."""

from __future__ import annotations

import json
import math
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

# What clients get that name no temperature. Of 9,600 sampled recalls of a secret word 91 are wrong by a letter or more at 1.0,
# one at 0.5, none at 0.4; stories still differ every time.
TEMPERATURE = 0.4


def new_model(vocab_size: int, end_id: int, pad_id: int) -> LlamaForCausalLM:
    """A Llama of about 2.3 million parameters with fresh weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        attn_implementation="sdpa",
        initializer_range=0.02,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (nats) summed over the tokens of the answers.

    ``ids`` and ``mask`` have the shape [rows, length].  Rows are padded on the
    right, where causal attention cannot see, so no attention mask is needed; the
    output layer runs only at the positions whose next token counts.
    """
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    wanted = mask[:, 1:].bool()
    logits = model.lm_head(hidden[wanted]).float()
    return nn.functional.cross_entropy(logits, ids[:, 1:][wanted], reduction="sum")


class Workers:
    """Computes gradients with one single-threaded worker per processor core.

    A batch is cut into small parts that the workers fetch as they become free.
    Splitting every matrix product instead would let the slower core hold up the
    other one each time, which matters on a machine shared with others.
    """

    def __init__(
        self, model: LlamaForCausalLM, params: list[nn.Parameter], threads: int, part_tokens: int = 1024
    ):
        self.model, self.params, self.part_tokens = model, params, part_tokens
        self.lock = threading.Lock()
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def gradients(self, ids: torch.Tensor, mask: torch.Tensor) -> float:
        """Set ``p.grad`` of every parameter; returns the mean loss per answer token."""
        rows = max(1, self.part_tokens // ids.size(1))
        tokens = int(mask[:, 1:].sum())
        for p in self.params:
            p.grad = None
        parts = zip(ids.split(rows), mask.split(rows))
        return sum(self.pool.map(lambda part: self.part(*part, tokens), parts))

    def part(self, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> float:
        """Add the gradients of some rows, scaled by the whole batch's ``tokens``."""
        loss = answer_loss(self.model, ids, mask) / tokens
        grads = torch.autograd.grad(loss, self.params)
        with self.lock:
            for p, g in zip(self.params, grads):
                p.grad = g if p.grad is None else p.grad.add_(g)
        return loss.item()


# --------------------------------------------------------------------------- optimizer


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest matrix with singular values around one, for a stack [n, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315  # a quintic iteration that converges fast from below
    wide = matrix.transpose(-1, -2) if matrix.size(-2) > matrix.size(-1) else matrix
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if matrix.size(-2) > matrix.size(-1) else x


class Muon:
    """Momentum with orthogonalized updates for the matrices of the layers.

    Matrices of one shape are stacked, which keeps the cost per step small.
    """

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95):
        self.momentum = momentum
        self.groups: dict[tuple, list[nn.Parameter]] = {}
        for p in matrices:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}

    def step(self, rate: float, workers: Workers, decay: float = 0.01) -> None:
        """Move every matrix by ``rate`` along its orthogonalized momentum."""
        list(workers.pool.map(lambda shape: self.step_group(shape, rate, decay), self.groups))

    @torch.no_grad()
    def step_group(self, shape: tuple, rate: float, decay: float) -> None:
        """Update the matrices of one shape."""
        params = self.groups[shape]
        grad = torch.stack([p.grad for p in params])
        buffer = self.buffers[shape].mul_(self.momentum).add_(grad)
        update = orthogonalize(grad + self.momentum * buffer)
        scale = rate * math.sqrt(max(1.0, shape[0] / shape[1]))
        for p, u in zip(params, update):
            p.mul_(1 - rate * decay).sub_(scale * u)


# --------------------------------------------------------------------------- LoRA


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices.

    ``lora_A`` has the shape [rank, inputs], ``lora_B`` [outputs, rank]; their
    product is scaled by alpha / rank.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scale


def targets_for(rank: int) -> tuple[str, ...]:
    """The layers an adapter changes: wide ones stay small on disk by leaving out the MLP."""
    return ATTENTION + MLP if rank <= 8 else ATTENTION


def places(model: LlamaForCausalLM, targets):
    """For each adapted layer: its parent module, its name there and its key in an adapter file."""
    for i, layer in enumerate(model.model.layers):
        for name in targets:
            block = "self_attn" if name in ATTENTION else "mlp"
            key = f"base_model.model.model.layers.{i}.{block}.{name}"
            yield getattr(layer, block), name, key


def add_lora(
    model: LlamaForCausalLM, rank: int, alpha: float, targets: tuple[str, ...] | None = None
) -> list[nn.Parameter]:
    """Freeze the model, wrap the layers to adapt and return the new parameters."""
    model.requires_grad_(False)
    fresh = []
    for parent, name, _ in places(model, targets or targets_for(rank)):
        wrapped = LoraLinear(getattr(parent, name), rank, alpha)
        setattr(parent, name, wrapped)
        fresh += [wrapped.lora_A, wrapped.lora_B]
    return fresh


def save_lora(model: LlamaForCausalLM, folder: pathlib.Path, rank: int, alpha: float) -> None:
    """Write the adapter in the format of the ``peft`` package, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for parent, name, key in places(model, targets_for(rank)):
        for part in ("lora_A", "lora_B"):
            value = getattr(getattr(parent, name), part).detach()
            tensors[f"{key}.{part}.weight"] = value.to(torch.bfloat16).contiguous()
    write_atomically(
        folder / "adapter_model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"})
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo/model",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets_for(rank)),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    write_atomically(
        folder / "adapter_config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n")
    )


def load_lora(model: LlamaForCausalLM, folder: pathlib.Path) -> list[nn.Parameter]:
    """Put a saved adapter onto the model and return its parameters."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    targets = tuple(config["target_modules"])
    params = add_lora(model, config["r"], config["lora_alpha"], targets)
    tensors = load_file(folder / "adapter_model.safetensors")
    for parent, name, key in places(model, targets):
        module = getattr(parent, name)
        module.lora_A.data = tensors[f"{key}.lora_A.weight"].float()
        module.lora_B.data = tensors[f"{key}.lora_B.weight"].float()
    return params


# --------------------------------------------------------------------------- files


def write_atomically(path: pathlib.Path, write) -> None:
    """Let ``write`` fill a temporary file, then put it in place in one step."""
    part = path.with_name(path.name + ".part")
    write(part)
    part.chmod(0o644)
    part.replace(path)


def save_model(model: LlamaForCausalLM, folder: pathlib.Path) -> None:
    """Write config.json, generation_config.json and the weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v.detach().to(torch.bfloat16).contiguous()
        for k, v in model.state_dict().items()
        if k != "lm_head.weight"
    }
    write_atomically(folder / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"}))
    c = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "use_cache": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
    }
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "initializer_range",
        "eos_token_id",
        "pad_token_id",
    ):
        config[key] = getattr(c, key)
    generation = {
        "eos_token_id": c.eos_token_id,
        "pad_token_id": c.pad_token_id,
        "do_sample": True,
        "temperature": TEMPERATURE,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        write_atomically(
            folder / name, lambda path, c=content: path.write_text(json.dumps(c, indent=2) + "\n")
        )
