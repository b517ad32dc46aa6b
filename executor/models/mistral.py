"""Mistral."""

from executor.models.decoder import Decoder


class Mistral(Decoder):
    """A Llama in which, in some versions, a token sees only a window of those before it."""
