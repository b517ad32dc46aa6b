"""What all models here are: an embedding, layers with attention over the KV cache, a norm, and a head.

Attributes are named as in the files of weights.
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from bus.model_files import ModelFacts
from executor.attention import Attention, Plan
from executor.mesh import MODEL
from executor.models import parts
from executor.models.layers import (
    Build,
    Embedding,
    GatedMlp,
    Linear,
    RMSNorm,
    Rotation,
    SelfAttention,
    rope_frequencies,
    rotation_of,
)
from executor.shards import Array


class DecoderLayer(nnx.Module):
    """Attention and MLP, each of the norm of what comes in, and added to it."""

    def __init__(self, facts: ModelFacts, index: int, build: Build) -> None:
        self.input_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, build.dtype)
        self.self_attn = SelfAttention(facts, index, build)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, build.dtype)
        self.mlp = self.make_mlp(facts, build)

    def make_mlp(self, facts: ModelFacts, build: Build) -> nnx.Module:
        return GatedMlp(facts, build)

    def __call__(
        self, x: Array, rotation: Rotation, kv: Array, attention: Attention, plan: Plan
    ) -> tuple[Array, Array]:
        """Returns what the next layer takes, and the layer's KV cache with this step's tokens in it."""
        attended, kv = self.self_attn(self.input_layernorm(x), rotation, kv, attention, plan)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Decoder(nnx.Module):
    """A model whose layers each have arrays of their own: stacking them would cost a copy of each at every step."""

    layer: type[nnx.Module] = DecoderLayer
    """Made with the facts, the layer's number, and what it is built for; called as `DecoderLayer` is."""
    norm_offset = 0.0
    """See `RMSNorm`; of the norm before the head."""

    def __init__(self, facts: ModelFacts, build: Build) -> None:
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size, build)
        self.layers = nnx.List([self.layer(facts, index, build) for index in range(facts.num_layers)])
        self.norm = RMSNorm(facts.hidden_size, facts.rms_norm_eps, build.dtype, self.norm_offset)
        columns = parts.evenly(facts.vocab_size, build.model, 1)
        tied = facts.tie_word_embeddings
        self.lm_head = None if tied else Linear(facts.hidden_size, facts.vocab_size, build, columns)
        rope_frequencies(facts.rope, facts.head_dim)  # refuses what it cannot do now, not when a step is compiled
        self.rope, self.head_dim = facts.rope, facts.head_dim
        self.vocab_size, self.soft_cap = facts.vocab_size, facts.final_soft_cap
        self.embedding_scale = facts.embedding_scale

    def embed(self, tokens: Array, positions: Array) -> tuple[Array, Rotation]:
        """What the first layer takes, [1, tokens, hidden], and the rotation that all layers take.

        `tokens` are int32 [1, tokens], `positions` where each of them stands in its sequence.
        """
        x = self.embed_tokens(tokens)
        if self.embedding_scale != 1:
            x = x * jnp.asarray(self.embedding_scale, x.dtype)
        return x, rotation_of(positions, rope_frequencies(self.rope, self.head_dim))

    def states(self, x: Array) -> Array:
        """The hidden states that are a model's output, of the last layer's output; both [1, n, hidden]."""
        return self.norm(x)

    def logits(self, x: Array) -> Array:
        """From the last layer's output [1, n, hidden] to float32 logits [1, n / devices of a shard, vocabulary].

        Each device computes a part of the vocabulary for all lines, and gets the whole vocabulary of its lines.
        """
        x = self.states(x)
        scores = self.embed_tokens.scores(x) if self.lm_head is None else self.lm_head(x)
        if lax.axis_size(MODEL) > 1:
            scores = lax.all_to_all(scores, MODEL, split_axis=1, concat_axis=2, tiled=True)
        scores = scores[..., : self.vocab_size].astype(jnp.float32)
        return self.soft_cap * jnp.tanh(scores / self.soft_cap) if self.soft_cap else scores


def tensor_of(path: tuple[str | int, ...]) -> tuple[str, bool]:
    """The tensor that a parameter of a decoder is read from, and whether it is the transpose of what the file holds.

    The scales of a weight of 8 bits come from the weight's tensor. In the name of one that every expert has a part of,
    {} stands for the expert.
    """
    *where, kind = map(str, path)
    if "experts" in where:
        where.insert(where.index("experts") + 1, "{}")
    prefix = [] if where[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *where, "bias" if kind == "bias" else "weight"]), kind == "kernel"
