"""The `Platform` class that `frontend.platform` names."""

from typing import TYPE_CHECKING

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from bus.model_files import ARCHITECTURES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser


class ServedModel(torch.nn.Module):
    """Tells vLLM what kind of model is served: one that generates text from token ids. It is never built."""

    def __init__(self, vllm_config: "VllmConfig", prefix: str = "") -> None:
        raise NotImplementedError("the executor runs the model")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class BusPlatform(Platform):
    """A device-less platform: tensors, where vLLM makes any, are host tensors, and no kernel library is loaded."""

    _enum = PlatformEnum.OOT
    device_name = "rankbus"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def import_kernels(cls) -> None:
        """Load nothing: vLLM's default loads its AVX-512 library, and the process would die on a CPU without."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Load nothing; see `import_kernels`."""

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        """Register the architectures that are served. vLLM would import its own models to see what they can do."""
        from vllm.model_executor.models.registry import ModelRegistry

        for architecture in ARCHITECTURES:
            ModelRegistry.register_model(architecture, ServedModel)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory: none is vLLM's."""
        return 0

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept any: the executor decides in which type the model runs."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: "VllmConfig") -> None:
        """Keep the block size of the configuration; vLLM has no attention backend here to ask."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return False
