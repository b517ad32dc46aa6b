"""The models that can be run, by the architecture that config.json names (`bus.model_files.ARCHITECTURES`)."""

from collections.abc import Callable
from typing import NamedTuple

from executor.models import llama


class Architecture(NamedTuple):
    """A model's class, and from a parameter's path the name of its tensor and whether that is transposed."""

    model: type[llama.Llama]
    weight_name: Callable[[tuple[str | int, ...]], tuple[str, bool]]


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama.Llama, llama.weight_name),
    "MistralForCausalLM": Architecture(llama.Llama, llama.weight_name),
}
