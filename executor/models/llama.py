"""Llama, and what has its shape: SmolLM2, Llama 2 and 3, Mistral. Attributes are named as in the files of weights."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from bus.model_files import ModelFacts
from executor.attention import Attention, Plan
from executor.kernels import products
from executor.models.layers import GatedMlp, RMSNorm, SelfAttention, linear, rope_frequencies, rotation_of
from executor.shards import Array


class LlamaLayer(nnx.Module):
    def __init__(self, facts: ModelFacts, dtype: Any, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, dtype)
        self.self_attn = SelfAttention(
            facts.hidden_size, facts.num_heads, facts.num_kv_heads, facts.head_dim, dtype, rngs
        )
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, dtype)
        self.mlp = GatedMlp(facts.hidden_size, facts.intermediate_size, dtype, rngs)

    def __call__(
        self, x: Array, rotation: tuple[Array, Array], kv: Array, attention: Attention, plan: Plan
    ) -> tuple[Array, Array]:
        attended, kv = self.self_attn(self.input_layernorm(x), rotation, kv, attention, plan)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Llama(nnx.Module):
    """A decoder whose layers each have arrays of their own: stacking them would cost a copy of each at every step."""

    def __init__(self, facts: ModelFacts, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(facts.vocab_size, facts.hidden_size, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(facts, dtype, rngs) for _ in range(facts.num_layers)])
        self.norm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, dtype)
        self.lm_head = None if facts.tie_word_embeddings else linear(facts.hidden_size, facts.vocab_size, dtype, rngs)
        rope_frequencies(facts.rope, facts.head_dim)  # refuses what it cannot do now, not when a step is compiled
        self.rope, self.head_dim = facts.rope, facts.head_dim

    def embed(self, tokens: Array, positions: Array) -> tuple[Array, tuple[Array, Array]]:
        """What the first layer takes, [shards, tokens, hidden], and the rotation that all layers take.

        `tokens` are int32 [shards, tokens], `positions` where each of them stands in its sequence.
        """
        frequencies = rope_frequencies(self.rope, self.head_dim)
        return products.look_up(self.embed_tokens.embedding[...], tokens), rotation_of(positions, frequencies)

    def logits(self, x: Array) -> Array:
        """From the last layer's output [..., hidden] to float32 logits [..., vocabulary]."""
        x = self.norm(x)
        if self.lm_head is None:
            return products.scores(x, self.embed_tokens.embedding[...]).astype(jnp.float32)
        return self.lm_head(x).astype(jnp.float32)


def weight_name(path: tuple[str | int, ...]) -> tuple[str, bool]:
    """The tensor that a parameter of `Llama` is read from, and whether it is the transpose of what the file holds."""
    *where, kind = map(str, path)
    prefix = [] if where[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *where, "weight"]), kind == "kernel"
