"""Llama, and what has its shape: SmolLM2, Llama 2 and 3."""

from executor.models.decoder import Decoder


class Llama(Decoder):
    """The plain decoder; Llama 3's long contexts are a matter of its rope parameters."""
