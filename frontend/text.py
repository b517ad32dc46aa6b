"""Serves the client bus's requests from or to text, through AsyncLLM: the core hands them up, and takes the answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import ChatParams
from vllm.renderers.inputs.preprocess import parse_model_prompt

from bus.core import Peer
from bus.log import get_logger
from bus.messages import Delta, Embed, Finished, FinishReason, Generate, Logprobs
from bus.wire import pack_ints
from frontend.errors import RequestError
from frontend.sampling import from_generate
from frontend.seam import AbortText, Call, RenderText, TextOutput, TextRefused, TextRendered

log = get_logger()


@dataclass(slots=True)
class _Progress:
    """How far the children of one request are. `finished` are those whose end was sent."""

    children: int
    prompt_tokens: int = 0
    output_tokens: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.output_tokens = [0] * self.children


class TextRequests:
    """The unfinished text requests of the client bus, one task each. All methods are called on the event loop."""

    def __init__(self, engine: EngineClient, adapters: Mapping[str, LoRARequest], post: Callable[[Call], None]) -> None:
        """`adapters` are those that requests may name, as they are when it is asked."""
        self._engine = engine
        self._adapters = adapters
        self._post = post
        self._tasks: dict[tuple[Peer, str], asyncio.Task[None]] = {}

    def on_render(self, effect: RenderText) -> None:
        """Start a request."""
        key = (effect.peer, effect.request.request_id)
        task = asyncio.get_running_loop().create_task(self._run(effect.peer, effect.request))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key) if self._tasks.get(key) is task else None)

    def on_abort(self, effect: AbortText) -> None:
        """Stop working on a request; its unfinished children end with the reason abort."""
        task = self._tasks.get((effect.peer, effect.request_id))
        if task is not None:
            task.cancel()

    async def _run(self, peer: Peer, request: Generate | Embed) -> None:
        progress = _Progress(request.num_sequences)
        try:
            if isinstance(request, Embed):
                self._post(TextRendered(peer=peer, request=await self._as_tokens(request)))
                return
            async for message in self._messages(request, progress):
                self._post(TextOutput(peer=peer, message=message))
        except asyncio.CancelledError:
            for index in range(progress.children):
                if index not in progress.finished:
                    self._post(TextOutput(peer=peer, message=_finished(request.request_id, index, "abort", progress)))
        except RequestError as error:
            self._refuse(peer, request, error.code, error.message)
        except (VLLMClientError, ValueError, TypeError) as error:
            # vLLM's own refusals: ValueError and TypeError are those its server answers with 400 as well
            self._refuse(peer, request, "invalid", str(error))
        except NotImplementedError as error:
            self._refuse(peer, request, "unsupported", str(error))
        except Exception as error:  # one request must not end the frontend
            log.exception("text request failed", request_id=request.request_id)
            self._refuse(peer, request, "internal", f"the frontend failed on this request: {type(error).__name__}")

    def _refuse(self, peer: Peer, request: Generate | Embed, code: str, message: str) -> None:
        self._post(TextRefused(peer=peer, request_id=request.request_id, code=code, message=message))

    async def _as_tokens(self, request: Embed) -> Embed:
        prompt = await self._render(request)
        tokens = pack_ints(np.asarray(prompt["prompt_token_ids"], np.int32))
        return structs.replace(request, text=None, messages=None, prompt_token_ids=tokens)

    async def _messages(self, request: Generate, progress: _Progress) -> AsyncIterator[Delta | Finished]:
        params = from_generate(request.params, detokenize=request.text_output)
        prompt = await self._render(request)
        progress.prompt_tokens = len(prompt["prompt_token_ids"])
        self._check_room(request, progress.prompt_tokens)
        adapter = self._adapters.get(request.adapter)
        if request.adapter and adapter is None:
            raise RequestError("unavailable", f"adapter {request.adapter!r} is loaded no more")
        outputs = self._engine.generate(
            prompt,
            params,
            request.request_id,
            lora_request=adapter,
            priority=request.priority,
            data_parallel_rank=request.rank,
        )
        prompt_logprobs: Logprobs | None = None
        begun: set[int] = set()
        async for output in outputs:
            prompt_logprobs = prompt_logprobs or _prompt_logprobs(output, request.params.prompt_logprobs)
            for child in output.outputs:
                if prompt_logprobs is not None and child.index not in begun:
                    begun.add(child.index)
                    own = structs.replace(prompt_logprobs, owner=child.index)
                    yield Delta(request_id=request.request_id, index=child.index, logprobs=own)
                progress.output_tokens[child.index] += len(child.token_ids)
                if child.token_ids or child.text:
                    yield _delta(request, child)
                if child.finish_reason is not None:
                    progress.finished.add(child.index)
                    reason = child.finish_reason
                    assert reason in (
                        "stop",
                        "length",
                        "abort",
                    )  # an error is raised, and repetition is never asked for
                    cached = output.num_cached_tokens or 0
                    yield _finished(request.request_id, child.index, reason, progress, child.stop_reason, cached)

    def _check_room(self, request: Generate, prompt_tokens: int) -> None:
        """Refuse more output than there is room for, as the core does for prompts of token ids."""
        max_model_len = self._engine.model_config.max_model_len
        room = max_model_len - prompt_tokens
        max_tokens = request.params.max_tokens
        if max_tokens is not None and max_tokens > room > 0:
            raise RequestError(
                "invalid",
                f"max_tokens {max_tokens} and a prompt of {prompt_tokens} tokens exceed max_model_len {max_model_len}; "
                f"at most {room} are possible",
            )

    async def _render(self, request: Generate | Embed) -> Any:
        """The prompt as vLLM's engine takes it, with its token ids."""
        renderer = self._engine.renderer
        extras = {"cache_salt": request.cache_salt} if request.cache_salt else None
        if request.messages is not None:
            answers = isinstance(request, Generate)
            chat = ChatParams(chat_template_kwargs={"add_generation_prompt": answers, "continue_final_message": False})
            messages = checked_messages(request.messages)
            _, prompts = await renderer.render_chat_async([messages], chat, prompt_extras=extras)
            return prompts[0]
        prompt: Any = request.text
        if request.prompt_token_ids is not None:
            prompt = TokensPrompt(prompt_token_ids=_token_ids(request.prompt_token_ids))
        parsed = parse_model_prompt(self._engine.model_config, prompt)
        (rendered,) = await renderer.render_cmpl_async([parsed], prompt_extras=extras)
        return rendered


def checked_messages(messages: list[dict[str, Any]]) -> list[Any]:
    """The chat messages, each checked to be one: the chat template would fail on another in its own words.

    Raises:
        RequestError: there is none, or one has no role.
    """
    if not messages:
        raise RequestError("invalid", "`messages` is empty; at least one message is needed")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError("invalid", f"`messages[{number}]` has no `role`; it is system, user, assistant or tool")
    return messages


def _token_ids(prompt: list[int] | memoryview) -> list[int]:
    return np.frombuffer(prompt, "<i4").tolist() if isinstance(prompt, memoryview) else prompt


def _delta(request: Generate, child: CompletionOutput) -> Delta:
    token_ids = np.asarray(child.token_ids, dtype="<i4")
    return Delta(
        request_id=request.request_id,
        index=child.index,
        token_ids=memoryview(token_ids.tobytes()),
        text=child.text,
        logprobs=_logprobs(child, request.params.logprobs),
    )


def _logprobs(child: CompletionOutput, most: int | None) -> Logprobs | None:
    """Those of a child's new tokens, `most` as in `GenerateParams.logprobs`."""
    if child.logprobs is None or most is None:
        return None
    return _as_arrays(child.index, list(child.token_ids), list(child.logprobs), most, 0)


def _prompt_logprobs(output: RequestOutput, most: int | None) -> Logprobs | None:
    """Those of the prompt, if they come with this: with the first output of each child, which are all the same."""
    found = output.prompt_logprobs
    if found is None or most is None or len(found) < 2:  # the first token has none
        return None
    return _as_arrays(0, list(output.prompt_token_ids or ())[1:], list(found)[1:], most, 1)


def _as_arrays(owner: int, tokens: list[int], positions: list[Any], most: int, prompt_position: int) -> Logprobs:
    """vLLM's dictionaries as arrays again: the token that stands there, then the most likely ones in their order."""
    token_ids, values = [], []
    for own, position in zip(tokens, positions, strict=True):
        likely = sorted(position, key=lambda token: position[token].rank or 0)
        for token in (own, *(likely if most < 0 else likely[:most])):
            token_ids.append(token)
            values.append(position[token].logprob)
    return Logprobs(
        owner=owner,
        positions=len(tokens),
        token_ids=_bytes(token_ids, "<i4"),
        values=_bytes(values, "<f4"),
        ranks=_bytes([position[own].rank or 0 for own, position in zip(tokens, positions, strict=True)], "<i4"),
        prompt_position=prompt_position,
    )


def _bytes(values: list[Any], dtype: str) -> memoryview:
    return memoryview(np.asarray(values, dtype=dtype).tobytes())


def _finished(
    request_id: str,
    index: int,
    reason: FinishReason,
    progress: _Progress,
    stop_reason: int | str | None = None,
    cached_tokens: int = 0,
) -> Finished:
    return Finished(
        request_id=request_id,
        index=index,
        reason=reason,
        stop_reason=stop_reason,
        prompt_tokens=progress.prompt_tokens,
        output_tokens=progress.output_tokens[index],
        cached_tokens=cached_tokens,
    )
