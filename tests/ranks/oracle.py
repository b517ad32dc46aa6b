"""vLLM's own scheduler as a side of a comparison."""

import logging
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bus.config import Config
from bus.messages import AddRequest, AppendInput, KvPool
from ranks.vllm_engine import Engine
from ranks.vllm_requests import new_request, next_turn, sampling_of
from tests.ranks.decisions import VOCAB, Decision, Emitted, Entered, Settings, State


class PlainScheduler(Scheduler):
    """vLLM's, but for statistics of drafts, which it wants to know the longest of beforehand."""

    def make_spec_decoding_stats(self, *_: Any, **__: Any) -> None:
        """Count nothing."""


class CorrectedScheduler(PlainScheduler):
    """vLLM's, without the faults that docs/scheduler.md shows and the native scheduler does not repeat."""

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        """What was to be computed in the step that does not happen must not be found in the prefix cache."""
        blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        computed = request.num_computed_tokens // self.block_size
        self.kv_cache_manager.evict_blocks({block.block_id for block in blocks[computed:]})
        super()._preempt_request(request, timestamp, drop_stale_output)

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        """Sessions wait in the same line as all others."""
        return False

    def keep_names_of_output(self) -> None:
        """Blocks of a session's output are to be named when its turn ends, and not to be found before."""
        manager = self.kv_cache_manager
        name, find = manager.coordinator.cache_blocks, manager.get_computed_blocks
        self._name = name

        def cache_blocks(request: Request, num_tokens: int, *rest: Any, **more: Any) -> Any:
            return name(request, min(num_tokens, _settled(request)), *rest, **more)

        def get_computed_blocks(request: Request) -> Any:
            names = request.block_hashes
            request.block_hashes = names[: _settled(request) // self.block_size]
            found = find(request)
            request.block_hashes = names
            return found

        manager.coordinator.cache_blocks = cache_blocks
        manager.get_computed_blocks = get_computed_blocks

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.resumable and self.kv_cache_manager.enable_caching:
            self._name(request, request.num_computed_tokens)
        return bool(super()._handle_stopped_request(request))

    def schedule(self, *rest: Any, **more: Any) -> Any:
        """Sessions that wait for input have no row."""
        self.max_num_active_reqs = self.scheduler_config.max_num_seqs + self.num_waiting_for_streaming_input
        return super().schedule(*rest, **more)


def _settled(request: Request) -> int:
    return int(request.num_prompt_tokens if request.resumable else request.num_tokens)


class OracleMaker:
    """Makes vLLM schedulers; its configuration is made once and changed for each."""

    def __init__(self) -> None:
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._engine = Engine(Config(async_depth=1, single_step=True))

    def make(self, settings: Settings, corrected: bool = True) -> "Oracle":
        pool = KvPool(
            num_blocks=settings.num_blocks + 1,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            vocab_size=VOCAB,
        )
        vllm_config, kv_config = self._engine.for_pool(pool, settings.max_model_len)
        vllm_config.cache_config.enable_prefix_caching = settings.enable_prefix_caching
        limits = vllm_config.scheduler_config
        limits.policy = settings.policy
        limits.max_num_seqs = settings.max_num_seqs
        limits.max_num_batched_tokens = limits.max_num_scheduled_tokens = settings.max_num_batched_tokens
        limits.long_prefill_token_threshold = settings.long_prefill_token_threshold
        kind = CorrectedScheduler if corrected else PlainScheduler
        scheduler = kind(
            vllm_config=vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=self._engine.grammars(),
            block_size=settings.block_size,
            log_stats=True,
        )
        if isinstance(scheduler, CorrectedScheduler):
            scheduler.keep_names_of_output()
        return Oracle(scheduler, settings, corrected)


class Oracle:
    """One vLLM scheduler. When `corrected`, of several that came at the same time the last is the last to be served."""

    def __init__(self, scheduler: Scheduler, settings: Settings, corrected: bool) -> None:
        self._vllm = scheduler
        self._settings = settings
        self._corrected = corrected
        self._output: Any = None

    def add(self, number: int, message: AddRequest) -> None:
        caching = self._settings.enable_prefix_caching
        request = new_request(number, 0, message, self._settings.block_size, caching)
        request.arrival_time = message.arrival_time + (number * 1e-6 if self._corrected else 0.0)
        self._vllm.add_request(request)

    def append(self, number: int, message: AppendInput) -> bool:
        session = self._vllm.requests[f"{number:012d}"]
        self._vllm.add_request(next_turn(session, message, sampling_of(session)))
        return bool(session.is_finished())

    def abort(self, number: int) -> bool:
        return bool(self._vllm.finish_requests(f"{number:012d}", RequestStatus.FINISHED_ABORTED))

    def pause(self, state: str) -> None:
        self._vllm._pause_state = PauseState[state.upper()]

    def reset(self, running: bool) -> bool:
        return bool(self._vllm.reset_prefix_cache(running))

    def schedule(self) -> Decision:
        self._output = output = self._vllm.schedule()
        cached = output.scheduled_cached_reqs
        resumed, given = [], []
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                resumed.append(Entered(int(request_id), computed, _ours(blocks[0])))
            elif blocks is not None:
                given.append((int(request_id), _ours(blocks[0])))
        return Decision(
            scheduled=tuple((int(request_id), count) for request_id, count in output.num_scheduled_tokens.items()),
            new=tuple(
                Entered(int(data.req_id), data.num_computed_tokens, _ours(data.block_ids[0]))
                for data in output.scheduled_new_reqs
            ),
            resumed=tuple(resumed),
            given=tuple(given),
            drafts=tuple((int(i), tuple(tokens)) for i, tokens in output.scheduled_spec_decode_tokens.items()),
            preempted=tuple(sorted(map(int, output.preempted_req_ids))),
        )

    def update(self, sampled: dict[int, list[int]]) -> tuple[Emitted, ...]:
        ids = list(self._output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[list(sampled[int(request_id)]) for request_id in ids],
        )
        outputs = self._vllm.update_from_output(self._output, result)
        return tuple(
            Emitted(
                int(item.request_id),
                tuple(item.new_token_ids),
                None if item.finish_reason is None else str(item.finish_reason),
                # A session's last turn's stop token stays there until another one takes its place
                item.stop_reason if [item.stop_reason] == list(item.new_token_ids)[-1:] else None,
            )
            for item in (outputs[0].outputs if 0 in outputs else ())
        )

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        ids = [f"{number:012d}" for number in drafts]
        self._vllm.update_draft_token_ids(DraftTokenIds(ids, [list(tokens) for tokens in drafts.values()]))

    def state(self) -> State:
        pool = self._vllm.kv_cache_manager.block_pool
        return State(
            running=tuple(int(request.request_id) for request in self._vllm.running),
            num_waiting=self._vllm.get_request_counts()[1],
            free_blocks=_ours([block.block_id for block in pool.free_block_queue.get_all_free_blocks()]),
            names=frozenset(bytes(key[:16]) for key in pool.cached_block_hash_to_block._cache),
        )


def _ours(blocks: list[int]) -> tuple[int, ...]:
    """Block 0 is vLLM's null block; ours begin there."""
    return tuple(block - 1 for block in blocks)
