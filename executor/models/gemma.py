"""Gemma 2."""

from flax import nnx

from bus.model_files import ModelFacts
from executor.attention import Attention, Plan
from executor.models.decoder import Decoder
from executor.models.layers import Build, GatedMlp, RMSNorm, Rotation, SelfAttention
from executor.shards import Array

OFFSET = 1.0
"""What Gemma's norms learn is how far their scale is from this."""


class Gemma2Layer(nnx.Module):
    """Attention and MLP, each with a norm before it and another after it."""

    def __init__(self, facts: ModelFacts, index: int, build: Build) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(facts.hidden_size, facts.rms_norm_eps, build.dtype, OFFSET)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(facts, index, build)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMlp(facts, build)
        self.post_feedforward_layernorm = norm()

    def __call__(
        self, x: Array, rotation: Rotation, kv: Array, attention: Attention, plan: Plan
    ) -> tuple[Array, Array]:
        """See `DecoderLayer`."""
        attended, kv = self.self_attn(self.input_layernorm(x), rotation, kv, attention, plan)
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), kv


class Gemma2(Decoder):
    """Every other layer has a sliding window; scores and logits have soft caps; embeddings are scaled."""

    layer = Gemma2Layer
    norm_offset = OFFSET
