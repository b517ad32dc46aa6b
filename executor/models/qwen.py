"""Qwen2, and Qwen3 with and without experts."""

from flax import nnx

from bus.model_files import ModelFacts
from executor.models.decoder import Decoder, DecoderLayer
from executor.models.experts import ExpertsMlp
from executor.models.layers import Build


class Qwen2(Decoder):
    """A Llama with biases on query, key and value."""


class Qwen3(Decoder):
    """A Llama with norms on each head's query and key."""


class Qwen3MoeLayer(DecoderLayer):
    """Its MLP is chosen among experts."""

    def make_mlp(self, facts: ModelFacts, build: Build) -> nnx.Module:
        return ExpertsMlp(facts, build)


class Qwen3Moe(Decoder):
    """A Qwen3 with experts."""

    layer = Qwen3MoeLayer
