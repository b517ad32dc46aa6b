"""vLLM's list of served models, with the adapters that the bus says are loaded: /v1/models and what loads them."""

import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest

from bus.messages import LoadAdapter, UnloadAdapter
from frontend.errors import RequestError


class ServedModels(OpenAIServingModels):
    """The served model and its adapters, whoever has them loaded. The engine client is a `frontend.engine.BusLLM`."""

    def __init__(self, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(engine_client, *args, **kwargs)
        self._client = engine_client.client
        self.lora_requests = engine_client.adapters

    async def load_lora_adapter(
        self, request: LoadLoRAAdapterRequest, base_model_name: str | None = None
    ) -> ErrorResponse | str:
        """Answer POST /v1/load_lora_adapter, as vLLM does."""
        refusal = await self._check_load_lora_adapter_request(request)
        if refusal is not None:
            return refusal
        if request.is_3d_lora_weight:
            return _refuse("is_3d_lora_weight is for adapters of experts, which this engine does not take")
        body = LoadAdapter(name=request.lora_name, path=request.lora_path, replace=request.load_inplace)
        try:
            await self._client.command(body)
        except RequestError as error:
            return _refuse(error.message, error.status_code)
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    async def unload_lora_adapter(self, request: UnloadLoRAAdapterRequest) -> ErrorResponse | str:
        """Answer POST /v1/unload_lora_adapter, as vLLM does: requests that run with the adapter go on to their ends."""
        refusal = await self._check_unload_lora_adapter_request(request)
        if refusal is not None:
            return refusal
        try:
            await self._client.command(UnloadAdapter(name=request.lora_name, wait=False))
        except RequestError as error:
            return _refuse(error.message, error.status_code)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


def _refuse(sentence: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> ErrorResponse:
    return create_error_response(message=sentence, err_type=status.phrase, status_code=status)


@contextlib.contextmanager
def served_models() -> Iterator[None]:
    """Let vLLM's server use `ServedModels`."""
    original = app_state.OpenAIServingModels
    app_state.OpenAIServingModels = ServedModels
    try:
        yield
    finally:
        app_state.OpenAIServingModels = original
