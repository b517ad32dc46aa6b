"""The native scheduler as a side of a comparison: by single-step mode, or by what goes over the step bus."""

from typing import Any

from bus.config import Config
from bus.counters import Counters
from bus.messages import AddRequest, AppendInput, KvPool, Outputs, PartialSchedule, StepResult
from bus.prefix import split_hashes
from bus.wire import pack_ints, unpack_ints
from ranks.native import NativeScheduler
from tests.ranks.decisions import VOCAB, Decision, Emitted, Entered, Settings, State


def make_native(settings: Settings, **options: Any) -> NativeScheduler:
    config = Config(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_prefix_caching=settings.enable_prefix_caching,
        policy=settings.policy,  # type: ignore[arg-type]
        **{"async_depth": 1} | options,
    )
    pool = KvPool(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        vocab_size=VOCAB,
    )
    return NativeScheduler(config, pool, Counters())


def as_on_the_bus(decision: Decision) -> Decision:
    """What of a decision shows on the step bus, where a request that brings output is resumed, not new."""
    return decision._replace(new=tuple(sorted(decision.new + decision.resumed)), resumed=(), preempted=())


class _Native:
    """What both ways have in common."""

    def __init__(self, scheduler: NativeScheduler) -> None:
        self.scheduler = scheduler
        self._step = 0
        self._names: set[bytes] = set()

    def add(self, number: int, message: AddRequest) -> None:
        self.scheduler.add(0, message, 0.0)

    def append(self, number: int, message: AppendInput) -> bool:
        return bool(self.scheduler.append(0, message, 0.0))

    def abort(self, number: int) -> bool:
        return bool(self.scheduler.finish(0, pack_ints([number]), "abort"))

    def has_reclaimed(self) -> bool:
        """Whether sessions have lost blocks to others, as vLLM's never do."""
        return bool(self.scheduler._statistics._counters.snapshot().get("scheduler_reclaimed_sessions"))

    def pause(self, state: str) -> None:
        self.scheduler.set_pause(state)  # type: ignore[arg-type]

    def reset(self, running: bool) -> bool:
        return self.scheduler.reset_prefix_cache(running)

    def set_drafts(self, drafts: dict[int, list[int]]) -> None:
        self.scheduler.set_drafts({f"r{number}": tokens for number, tokens in drafts.items()})

    def state(self) -> State:
        scheduler = self.scheduler
        changes = scheduler.take_kv_changes()
        if changes.cleared:
            self._names = set(split_hashes(scheduler.kv_snapshot()))
        else:
            stored, removed = set(split_hashes(changes.stored)), set(split_hashes(changes.removed))
            assert not stored & self._names
            assert removed <= self._names
            self._names = (self._names | stored) - removed
        batch, pool = scheduler._batch, scheduler._blocks
        free = []
        block = pool._next[pool.num_blocks]
        while block != pool.num_blocks:
            free.append(block)
            block = pool._next[block]
        assert len(free) == pool.num_free
        return State(
            running=tuple(batch.request(row).handle for row in batch.running.tolist()),
            num_waiting=scheduler.request_counts()[1],
            free_blocks=tuple(free),
            names=frozenset(self._names),
        )


class NativeSingleStep(_Native):
    """Asked for steps by command."""

    def schedule(self) -> Decision:
        rendered = self.scheduler.render(self._step, 0.0)
        self._step += 1
        cached = rendered["scheduled_cached_reqs"]
        resumed, given = [], []
        for name, blocks, computed in zip(
            cached["req_ids"], cached["new_block_ids"], cached["num_computed_tokens"], strict=True
        ):
            if name in cached["resumed_req_ids"]:
                resumed.append(Entered(_number(name), computed, tuple(blocks[0])))
            elif blocks is not None:
                given.append((_number(name), tuple(blocks[0])))
        return Decision(
            scheduled=tuple((_number(name), count) for name, count in rendered["num_scheduled_tokens"].items()),
            new=tuple(
                Entered(_number(data["req_id"]), data["num_computed_tokens"], tuple(data["block_ids"][0]))
                for data in rendered["scheduled_new_reqs"]
            ),
            resumed=tuple(resumed),
            given=tuple(given),
            drafts=tuple((_number(n), tuple(tokens)) for n, tokens in rendered["scheduled_spec_decode_tokens"].items()),
            preempted=tuple(sorted(map(_number, rendered["preempted_req_ids"]))),
        )

    def update(self, sampled: dict[int, list[int]]) -> tuple[Emitted, ...]:
        given = {f"r{number}": tokens for number, tokens in sampled.items() if self.scheduler.has(0, number)}
        emitted = self.scheduler.update_by_id(given)[1]
        return tuple(
            Emitted(_number(name), tuple(item["new_token_ids"]), item["finish_reason"], item["stop_reason"])
            for name, item in emitted.items()
        )


class NativeOnTheBus(_Native):
    """Read as an executor and a frontend read it. Preemptions do not show there, nor can drafts be given."""

    def __init__(self, scheduler: NativeScheduler) -> None:
        super().__init__(scheduler)
        self._rows: dict[int, int] = {}
        self._schedule: PartialSchedule | None = None
        self._ran: list[int] = []
        """The rows of the last schedule."""

    def schedule(self) -> Decision:
        self._schedule = schedule = self.scheduler.schedule(self._step, 0.0)
        if schedule is None:
            return Decision((), (), (), (), (), ())
        self._step += 1
        new, resumed = [], []
        for item in schedule.new:
            self._rows[item.row] = _number(item.request_id)
            new.append(self._entered(item))
        for again in schedule.resumed:
            self._rows[again.row] = _number(again.request_id)
            resumed.append(self._entered(again))
        given: dict[int, list[int]] = {}
        for row, block in zip(
            unpack_ints(schedule.block_rows).tolist(), unpack_ints(schedule.block_ids).tolist(), strict=True
        ):
            given.setdefault(self._rows[row], []).append(block)
        rows = self._ran = self._ran if schedule.again else unpack_ints(schedule.rows).tolist()
        counts = unpack_ints(schedule.num_tokens).tolist() or [1] * len(rows)
        decision = Decision(
            scheduled=tuple((self._rows[row], count) for row, count in zip(rows, counts, strict=True)),
            new=tuple(new),
            resumed=tuple(resumed),
            given=tuple((number, tuple(blocks)) for number, blocks in given.items()),
            drafts=(),
            preempted=(),
        )
        return as_on_the_bus(decision)

    def _entered(self, item: Any) -> Entered:
        blocks = tuple(unpack_ints(item.block_ids).tolist())
        return Entered(_number(item.request_id), item.num_computed_tokens, blocks)

    def update(self, sampled: dict[int, list[int]]) -> tuple[Emitted, ...]:
        schedule = self._schedule
        if schedule is None:
            return ()
        step = self.scheduler._steps[0]
        tokens = [
            (sampled[self._rows[row]] or [-1])[0] if samples else -1
            for row, samples in zip(self._ran, step.samples.tolist(), strict=True)
        ]
        messages = self.scheduler.update(StepResult(step=schedule.step, tokens=pack_ints(tokens)))
        assert [frontend for frontend, _ in messages] in ([], [0])
        return _emitted(messages[0][1]) if messages else ()


def _emitted(message: Outputs) -> tuple[Emitted, ...]:
    ended = {item.handle: item for item in message.ended}
    handles, tokens = unpack_ints(message.handles).tolist(), unpack_ints(message.tokens).tolist()
    assert not message.counts.nbytes
    emitted = []
    for handle, token in zip(handles, tokens, strict=True):
        end = ended.pop(handle, None)
        emitted.append(Emitted(handle, (token,), end and end.reason, end and end.stop_reason))
    assert not ended
    return tuple(emitted)


def _number(name: str) -> int:
    return int(name[1:])
