"""Language models as the simulator sees them: how many bytes they have, and what a token costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder, Llama-shaped or, with two matrices in its MLP, OPT-shaped.

    max_tokens: of a request, prompt and answer together. adapts_output: adapters are on q, k, v and o, else on q, k and v.
    counted_kv_bytes: of a token's KV where heads and dtype do not give it; else 0.

    Source of the figures: each model's config.json. OPT's embedding is its head, too, and has positions; that is not modelled.
    """

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    max_tokens: int
    dtype_bytes: int = 2
    mlp_matrices: int = 3
    adapts_output: bool = True
    counted_kv_bytes: int = 0

    @property
    def hidden_kv(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.num_heads * self.num_kv_heads

    @property
    def layer_weights(self) -> int:
        """Number of weights of all layers: q and o, k and v, and the matrices of the MLP. Norms are left out."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.hidden_kv
        return self.num_layers * (attention + self.mlp_matrices * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Number of weights of the head."""
        return self.hidden * self.vocabulary

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device, the embedding included."""
        return (self.layer_weights + 2 * self.head_weights) * self.dtype_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it looks up a few rows."""
        return (self.layer_weights + self.head_weights) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's KV over all layers."""
        return self.counted_kv_bytes or 2 * self.num_layers * self.hidden_kv * self.dtype_bytes

    @property
    def lora_weights_per_rank(self) -> int:
        """Number of an adapter's weights for each rank. Source: on q, k, v and o, S-LoRA's and Chameleon's setting; on q, k and v, CaraServe's."""
        into_kv = 2 * (self.hidden + self.hidden_kv)
        into_hidden = 2 * self.hidden * (2 if self.adapts_output else 1)
        return self.num_layers * (into_kv + into_hidden)

    @property
    def adapted_share(self) -> float:
        """The part of the layers' weights that belongs to matrices with adapters."""
        num_square = 2 if self.adapts_output else 1
        adapted = self.hidden * (num_square * self.hidden + 2 * self.hidden_kv)
        return self.num_layers * adapted / self.layer_weights

    def lora_bytes(self, rank: int) -> int:
        """Return the bytes of an adapter of this rank."""
        return rank * self.lora_weights_per_rank * self.dtype_bytes


LLAMA_7B = Model("llama-7b", 32, 4096, 11008, 32, 32, 32_000, 2048)
LLAMA_13B = Model("llama-13b", 40, 5120, 13824, 40, 40, 32_000, 2048)
LLAMA_30B = Model("llama-30b", 60, 6656, 17920, 52, 52, 32_000, 2048)
LLAMA2_7B = Model("llama2-7b", 32, 4096, 11008, 32, 32, 32_000, 4096)
OPT_13B = Model("opt-13b", 40, 5120, 20480, 40, 40, 50_272, 2048, mlp_matrices=2)
OPT_30B = Model("opt-30b", 48, 7168, 28672, 56, 56, 50_272, 2048, mlp_matrices=2)
MISTRAL_7B = Model("mistral-7b", 32, 4096, 14336, 32, 8, 32_000, 8192)
LLAMA3_8B = Model("llama3-8b", 32, 4096, 14336, 32, 8, 128_256, 8192)
