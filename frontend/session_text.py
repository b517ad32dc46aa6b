"""The HTTP side of sessions: tokens for their text, text for their tokens, and what WebSocket connections are told."""

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.renderers import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from bus.log import get_logger
from bus.messages import Delta, Finished, Message, SessionResumed, TurnFinished
from frontend.errors import RequestError
from frontend.seam import (
    BeginTurn,
    Call,
    Deliver,
    Delivery,
    InputRendered,
    RenderInput,
    SessionOutput,
    ToConnection,
)
from frontend.text import checked_messages

log = get_logger()

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for an answer in a chat template: what the template writes after it is what comes after an answer."""

Outlet = Callable[[int, Message | BeginTurn], None]
"""Takes a message of a session, with the turn that it is of; or its first turn's beginning."""


@dataclass(slots=True)
class _Turn:
    """A session's turn on its way to the client. `detokenizer` is None for a session that wants no text."""

    begin: BeginTurn
    detokenizer: IncrementalDetokenizer | None


class SessionTexts:
    """The sessions whose output comes over the seam. All methods are called on the event loop."""

    def __init__(self, engine: EngineClient, post: Callable[[Call], None]) -> None:
        self._engine = engine
        self._post = post
        self._turns: dict[str, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: dict[int, Outlet] = {}
        """The open connections, by number."""

    # Output

    def on_begin(self, effect: BeginTurn) -> None:
        """Begin a turn: its text begins anew, as that of a request whose prompt is all there was before it."""
        detokenizer = self._detokenizer(effect) if effect.text_output else None
        self._turns[effect.delivery] = _Turn(effect, detokenizer)
        if effect.connection is not None and effect.turn == 1 and effect.connection in self.connections:
            self.connections[effect.connection](1, effect)

    def on_deliver(self, effect: Deliver) -> None:
        """Take the outputs of one rank's step; those of requests are not ours."""
        if self._turns:
            for output in effect.outputs:
                turn = self._turns.get(output.request_id)
                if turn is not None:
                    self._pass_on(turn, output)

    def on_message(self, effect: ToConnection) -> None:
        """Tell a connection something; nothing if it is gone."""
        outlet = self.connections.get(effect.connection)
        if outlet is not None:
            outlet(0, effect.message)

    def _pass_on(self, turn: _Turn, output: Delivery) -> None:
        request_id = turn.begin.request_id
        tokens = np.frombuffer(output.token_ids, "<i4").tolist()
        text = ""
        if turn.detokenizer is not None:
            # As for a request, a stop token has no text.
            stopped = any(isinstance(one, TurnFinished) and one.reason == "stop" for one in output.messages)
            turn.detokenizer.update(tokens, stopped)
            text = turn.detokenizer.get_next_output_text(finished=bool(output.messages), delta=True)
        if tokens:
            logprobs = output.logprobs
            own = None if logprobs is None else structs.replace(logprobs, owner=0)
            self._tell(turn, Delta(request_id=request_id, token_ids=output.token_ids, text=text, logprobs=own))
        for message in output.messages:
            self._tell(turn, message)
            if isinstance(message, Finished):
                del self._turns[turn.begin.delivery]

    def _tell(self, turn: _Turn, message: Delta | TurnFinished | Finished | SessionResumed) -> None:
        begin = turn.begin
        if begin.connection is None:
            self._post(SessionOutput(session=begin.session, message=message))
        elif (outlet := self.connections.get(begin.connection)) is not None:
            outlet(begin.turn, message)

    def _detokenizer(self, effect: BeginTurn) -> IncrementalDetokenizer:
        request = EngineCoreRequest(
            request_id=effect.delivery,
            prompt_token_ids=np.frombuffer(effect.token_ids, "<i4").tolist(),
            mm_features=None,
            sampling_params=SamplingParams(),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        return IncrementalDetokenizer.from_new_request(self._engine.renderer.get_tokenizer(), request)

    # Input

    def on_render(self, effect: RenderInput) -> None:
        """Tokenise an input; answered by one `InputRendered`."""
        task = asyncio.get_running_loop().create_task(self._render(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _render(self, effect: RenderInput) -> None:
        answer: dict[str, Any]
        try:
            tokens = await self._tokens(effect)
            answer = {"token_ids": memoryview(np.asarray(tokens, "<i4").tobytes())}
        except RequestError as error:
            answer = {"code": error.code, "message": error.message}
        except (VLLMClientError, ValueError, TypeError) as error:
            # vLLM's own refusals: ValueError and TypeError are those its server answers with 400 as well
            answer = {"code": "invalid", "message": str(error)}
        except NotImplementedError as error:
            answer = {"code": "unsupported", "message": str(error)}
        except Exception as error:  # one input must not end the frontend
            log.exception("a session's input failed", session=effect.session)
            words = f"the frontend failed on this input: {type(error).__name__}"
            answer = {"code": "internal", "message": words}
        self._post(InputRendered(session=effect.session, input=effect.input, **answer))

    async def _tokens(self, effect: RenderInput) -> list[int]:
        if effect.messages is None:
            return await self._tokenise(effect.text or "", special=effect.opening)
        messages = checked_messages(effect.messages)
        if effect.opening:
            return await self._tokenise(await self._template(messages), special=False)
        # Some templates want a question before each answer.
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = (await self._template([*before, *messages])).rpartition(ANSWER)
        if not found:
            raise RequestError("unsupported", "the chat template does not show what follows an answer; send text")
        return await self._tokenise(after, special=False)

    async def _template(self, messages: list[Any]) -> str:
        """The text of a conversation, up to where the next answer begins."""
        kwargs = {"add_generation_prompt": True, "continue_final_message": False, "tokenize": False}
        _, prompt = await self._engine.renderer.render_messages_async(messages, ChatParams(chat_template_kwargs=kwargs))
        return str(prompt["prompt"])

    async def _tokenise(self, text: str, special: bool) -> list[int]:
        """The tokens of a text; `special` is whether the tokenizer puts those before it that begin a text."""
        renderer = self._engine.renderer
        params = dataclasses.replace(renderer.default_cmpl_tok_params, add_special_tokens=special)
        (prompt,) = await renderer.tokenize_prompts_async([{"prompt": text}], params)
        return list(prompt["prompt_token_ids"])
