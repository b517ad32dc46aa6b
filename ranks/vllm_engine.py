"""The vLLM objects that a scheduler is made from: configuration, KV layout, grammars."""

import json
import tempfile
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.model_executor.models import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar, validate_guidance_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from bus.config import Config, ConfigError
from bus.messages import Grammar, KvPool
from bus.model_files import resolve
from ranks.grammars import BadGrammar, check_size, sentence_of
from ranks.vllm_requests import structured_outputs

_STAND_IN = "RankbusStandIn"


class _StandIn(torch.nn.Module):
    """A decoder for text, as far as vLLM inspects a model class. It never runs.

    With a class at hand vLLM does not start a process of its own to look at the real one (8 s, when not remembered).
    """

    def __init__(self, vllm_config: Any, prefix: str = "") -> None: ...
    def embed_input_ids(self, input_ids: Any) -> Any: ...
    def forward(self, input_ids: Any, positions: Any) -> Any: ...
    def compute_logits(self, hidden_states: Any) -> Any: ...


class Engine:
    """vLLM's configuration for one rank, made once; a pool's figures are filled in when it is known."""

    def __init__(self, config: Config) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {config.max_num_batched_tokens} is less than max_num_seqs "
                f"({config.max_num_seqs}); every running request needs a token in a step"
            )
        self._config = config
        self._vllm_config = _vllm_config(config)
        self._vocab_size = 0

    def for_pool(self, pool: KvPool, max_model_len: int) -> tuple[VllmConfig, KVCacheConfig]:
        """Configuration and KV layout of a scheduler with this pool: one group of layers, all with full attention."""
        settings = self._vllm_config
        settings.cache_config.num_gpu_blocks = pool.num_blocks
        settings.cache_config.block_size = pool.block_size
        settings.model_config.max_model_len = max_model_len
        settings.scheduler_config.max_model_len = max_model_len
        settings.model_config.hf_text_config.vocab_size = self._vocab_size = pool.vocab_size
        spec = FullAttentionSpec(block_size=pool.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        return settings, KVCacheConfig(num_blocks=pool.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    def grammars(self) -> StructuredOutputManager:
        """What vLLM's scheduler asks about grammars. It knows no tokenizer: grammars come to it compiled."""
        return StructuredOutputManager(self._vllm_config)

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """The beginning of a grammar. Takes from milliseconds to seconds, the first time for the tokenizer, too.

        Raises:
            BadGrammar: there is something wrong with it.
        """
        check_size(grammar)
        try:
            params = structured_outputs(grammar)
            validate_guidance_grammar(SamplingParams(structured_outputs=params))
        except (ValueError, AttributeError, RecursionError, VLLMClientError) as error:
            raise BadGrammar(sentence_of(str(error) or type(error).__name__)) from None
        compiled = self.backend.compile_grammar(*get_structured_output_key(params))
        if fault := compiled.ll_matcher.get_error():
            raise BadGrammar(sentence_of(fault))
        return cast(GuidanceGrammar, compiled)

    @cached_property
    def backend(self) -> GuidanceBackend:
        """What vLLM compiles grammars with, for the served model's tokenizer, which is loaded for it."""
        model = copy(self._vllm_config.model_config)
        model.tokenizer = str(resolve(self._config).folder)
        model.skip_tokenizer_init = False
        tokenizer = cached_tokenizer_from_config(model)
        return GuidanceBackend(self._vllm_config, tokenizer, self._vocab_size)


def _vllm_config(config: Config) -> VllmConfig:
    ModelRegistry.register_model(_STAND_IN, _StandIn)
    with tempfile.TemporaryDirectory(prefix="rankbus-") as folder:
        facts = {
            "architectures": [_STAND_IN],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "vocab_size": 64,
            "max_position_embeddings": 2**20,
            "torch_dtype": "float32",
        }
        (Path(folder) / "config.json").write_text(json.dumps(facts))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=True,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.policy,
            async_scheduling=config.async_depth > 1,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=config.enable_prefix_caching, publisher="null"),
        ).create_engine_config()
