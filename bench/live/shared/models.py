"""The model that the live benches run, a Llama with random weights, and LoRA adapters for it. All are written once per machine.

Random weights cost what trained ones cost, and greedy answers of a wide random model differ with every prompt, so that a wrong KV block
shows as a wrong token. Twelve layers of 768 with four KV heads of 64 (grouped as in today's models): 75 M weights outside the embedding.
A vocabulary of 320 keeps the embedding and the sampler from hiding the layers.

Adapters change q, k, v and o of every layer in the model's type. Their deltas have about a third of the size of what the base weights give: every
adapter answers otherwise, and nothing overflows.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

ADAPTER_SCALING = 2  # lora_alpha over the rank, as in most of PEFT's examples
# Of an adapter's delta to the input's size; a base weight of 768 inputs gives 1.1. Chosen.
ADAPTER_STRENGTH = 0.3


class ModelShape(Struct, frozen=True, kw_only=True):
    """Sizes of a bench model. `dtype` is the name that torch and config.json use.

    float32: measured on a CPU with AVX-512 BF16, bfloat16 was no faster from 2,048 tokens on (1.6 against 1.6 s; 4.0 against 4.1 s for
    4,096), without those instructions it is far slower, and float32 has twice the bytes to restore: the harder case.
    """

    num_layers: int = 12
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_heads: int = 12
    num_kv_heads: int = 4
    vocab_size: int = 320
    max_model_len: int = 8192
    dtype: str = "float32"
    seed: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token over all layers."""
        return (
            2 * self.num_layers * self.num_kv_heads * self.head_dim * (2 if self.dtype == "bfloat16" else 4)
        )

    @property
    def name(self) -> str:
        """Name of the model's folder."""
        heads = f"{self.num_heads}x{self.num_kv_heads}"
        return f"llama-{self.num_layers}x{self.hidden_size}-{heads}-{self.max_model_len}-{self.dtype}-seed{self.seed}"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a layer's modules, by name."""
        hidden, kv_width, inner = self.hidden_size, self.num_kv_heads * self.head_dim, self.intermediate_size
        attention = {"q_proj": hidden, "k_proj": kv_width, "v_proj": kv_width, "o_proj": hidden}
        mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        return {f"self_attn.{name}": (hidden, num_out) for name, num_out in attention.items()} | {
            f"mlp.{name}": widths for name, widths in mlp.items()
        }

    @property
    def adapted(self) -> dict[str, tuple[int, int]]:
        """Sizes of the modules that adapters change."""
        return {name: widths for name, widths in self.linears.items() if name.startswith("self_attn")}

    def adapter_bytes(self, rank: int) -> int:
        """Return the bytes of all of an adapter's weights at this rank."""
        widths = sum(num_in + num_out for num_in, num_out in self.adapted.values())
        return self.num_layers * rank * widths * (2 if self.dtype == "bfloat16" else 4)


def model_folder(shape: ModelShape, *, has_weights: bool = True) -> Path:
    """The model's folder, written at first use (about 2 s). Safe when several processes ask at once.

    has_weights: False for a model that is too large to be written; vLLM makes weights up (`load_format=dummy`).
    """
    folder = cache_folder() / (shape.name if has_weights else f"{shape.name}-without-weights")
    write_once(folder, "config.json", lambda written: _write(written, shape, has_weights))
    return folder


def adapter_folders(shape: ModelShape, ranks: Sequence[int]) -> list[Path]:
    """PEFT folders of adapters with these ranks, named by rank and number; each is written at first use, which takes about a second for 100 MB."""
    parent = cache_folder() / f"{shape.name}-adapters"
    folders = [parent / f"rank{rank}-{number:03d}" for number, rank in enumerate(ranks)]
    for number, (folder, rank) in enumerate(zip(folders, ranks, strict=True)):
        write = partial(write_adapter, shape=shape, rank=rank, seed=number)
        write_once(folder, "adapter_config.json", write)
    return folders


def cache_folder() -> Path:
    """Return the folder of this machine in which benches keep models and adapters."""
    return Path(tempfile.gettempdir()) / f"overture-bench-{os.getuid()}"


def write_once(folder: Path, last_file: str, write: Callable[[Path], None]) -> None:
    """Have `write` make the folder unless it exists; other processes never see half of it."""
    if (folder / last_file).is_file():
        return
    cache = cache_folder()
    cache.mkdir(mode=0o700, exist_ok=True)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        written = Path(scratch) / folder.name
        write(written)
        try:
            written.rename(folder)  # atomic
        except OSError:
            if not (folder / last_file).is_file():
                shutil.rmtree(folder)
                written.rename(folder)


def _write(folder: Path, shape: ModelShape, has_weights: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=shape.dtype,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        # Twice Llama's 0.02: at that size the layers add so little that nearly every prompt gets the same answer.
        initializer_range=0.04,
        rms_norm_eps=1e-5,
        max_position_embeddings=shape.max_model_len,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if has_weights:
        torch.manual_seed(shape.seed)
        LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(folder)
    config.save_pretrained(folder)


def write_adapter(
    folder: Path, shape: ModelShape, rank: int, seed: int, modules: Sequence[str] | None = None
) -> None:
    """Write a PEFT folder, which must not be there. modules: that it changes, of `shape.linears`; None: the usual ones."""
    import numpy as np
    import torch

    generator = np.random.default_rng(seed)  # several times as fast as torch's
    dtype = getattr(torch, shape.dtype)

    def weight(size: tuple[int, int], deviation: float) -> Any:
        """Return random weights of this size and standard deviation."""
        return torch.from_numpy(generator.standard_normal(size, dtype=np.float32)).mul_(deviation).to(dtype)

    tensors: dict[str, Any] = {}
    modules = list(shape.adapted) if modules is None else modules
    for layer in range(shape.num_layers):
        for module in modules:
            num_in, num_out = shape.linears[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            b_deviation = ADAPTER_STRENGTH / ADAPTER_SCALING * rank**-0.5
            tensors[f"{name}.lora_A.weight"] = weight((rank, num_in), num_in**-0.5)
            tensors[f"{name}.lora_B.weight"] = weight((num_out, rank), b_deviation)
    save_adapter(folder, tensors, rank, ADAPTER_SCALING * rank)


def save_adapter(folder: Path, tensors: dict[str, Any], rank: int, alpha: int) -> None:
    """Write an adapter's weights as a PEFT folder, which must not be there. tensors: by PEFT's names."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def write_tokenizer(folder: Path) -> None:
    """One token per byte: prompts come as token ids, only the server's start wants a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    )
    fast.save_pretrained(folder)
