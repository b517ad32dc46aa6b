"""The models that can be run, by the architecture that config.json names (`bus.model_files.ARCHITECTURES`)."""

from executor.models import gemma, llama, mistral, qwen
from executor.models.decoder import Decoder

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": llama.Llama,
    "MistralForCausalLM": mistral.Mistral,
    "Qwen2ForCausalLM": qwen.Qwen2,
    "Qwen3ForCausalLM": qwen.Qwen3,
    "Qwen3MoeForCausalLM": qwen.Qwen3Moe,
    "Gemma2ForCausalLM": gemma.Gemma2,
}
