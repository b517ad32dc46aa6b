"""The table of docs/sessions.md: what vLLM's tests of sessions look at, asked of a rank from outside."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bus.config import Config
from bus.core import Drained, Event, Peer, PeerUp, Received, Send
from bus.counters import Counters
from bus.messages import (
    AddRequest,
    AppendInput,
    Command,
    CommandRequest,
    Error,
    KvPool,
    MinRemainingOutput,
    MultimodalFeature,
    Outputs,
    PartialSchedule,
    PendingPrefillTokens,
    Reply,
    RequestCounts,
    Sampling,
    Schedule,
    StepResult,
    StopTurn,
    TokenCount,
    TurnEnded,
    UnfinishedRequests,
    UpdateFromOutput,
)
from bus.wire import pack_ints, unpack_ints
from ranks.core import RankCore
from ranks.native import NativeScheduler

DOCUMENT = Path(__file__).parents[2] / "docs" / "sessions.md"
STOP = 128001
FRONTEND = Peer("command", "frontend", 0, 1)
EXECUTOR = Peer("step", "executor", 0, 1)
POOL = KvPool(num_blocks=999, block_size=16, max_model_len=1024, vocab_size=STOP + 1)


def stated() -> dict[str, Any]:
    """The values of the table, by number."""
    rows = re.findall(r"^\| (\d+\.\d+) \|.*\| `([^`]*)` \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {number: json.loads(value) for number, value in rows}


class Rank:
    """A rank, what it sends, and what of the table it was asked for."""

    def __init__(self, single_step: bool = True) -> None:
        config = Config(single_step=single_step, async_depth=1, enable_prefix_caching=False)
        counters = Counters()
        self.core = RankCore(0, config, lambda pool: NativeScheduler(config, pool, counters), counters)
        self.sent: list[Any] = []
        self.sequence = 0
        self.give(PeerUp(FRONTEND), PeerUp(EXECUTOR), Received(EXECUTOR, POOL))

    def give(self, *events: Event) -> list[Any]:
        effects = [effect for event in (*events, Drained(0.0)) for effect in self.core.handle(event)]
        new = [effect.message for effect in effects if isinstance(effect, Send)]
        self.sent += new
        return new

    def open(self, tokens: list[int], max_tokens: int = 16, features: tuple[MultimodalFeature, ...] = ()) -> None:
        self.sequence += 1
        request = AddRequest(
            handle=0,
            sequence=self.sequence,
            request_id="session",
            prompt_token_ids=pack_ints(tokens),
            sampling=self.sampling(max_tokens),
            resumable=True,
            mm_features=list(features),
        )
        self.give(Received(FRONTEND, request))

    def append(
        self,
        tokens: list[int],
        max_tokens: int | None = None,
        close: bool = False,
        features: tuple[MultimodalFeature, ...] = (),
    ) -> list[Any]:
        self.sequence += 1
        sampling = None if max_tokens is None else self.sampling(max_tokens)
        turn = AppendInput(
            handle=0,
            sequence=self.sequence,
            prompt_token_ids=pack_ints(tokens),
            sampling=sampling,
            close=close,
            mm_features=list(features),
        )
        return self.give(Received(FRONTEND, turn))

    def stop(self, turn: int, n: int) -> None:
        self.sequence += 1
        self.give(Received(FRONTEND, StopTurn(handle=0, sequence=self.sequence, turn=turn, n=n)))

    def sampling(self, max_tokens: int) -> Sampling:
        return Sampling(seed=0, max_tokens=max_tokens, stop_token_ids=[STOP])

    def value(self, body: Command) -> Any:
        """What a command is answered with."""
        sent = self.give(Received(FRONTEND, CommandRequest(command_id=1, body=body)))  # type: ignore[arg-type]
        (reply,) = [message for message in sent if isinstance(message, Reply)]
        return reply.value

    def sample(self, *tokens: int) -> list[Any]:
        """Steps that draw these tokens; what `UpdateFromOutput` says of each."""
        emitted = []
        for token in tokens:
            self.value(Schedule())
            emitted.append(self.value(UpdateFromOutput(sampled_token_ids={"session": [token]})))
        return emitted

    @property
    def turns(self) -> list[TurnEnded]:
        return [turn for message in self.sent if isinstance(message, Outputs) for turn in message.turns]

    @property
    def tokens(self) -> list[int]:
        return [token for m in self.sent if isinstance(m, Outputs) for token in unpack_ints(m.tokens).tolist()]

    def without_output(self) -> None:
        """A session that waits for input after three tokens of prompt, which are computed, and no output."""
        self.value(Schedule())
        self.stop(1, 0)
        self.value(UpdateFromOutput(sampled_token_ids={"session": [9]}))


def two_openings() -> dict[str, Any]:
    rank = Rank()
    rank.open([])
    seen: dict[str, Any] = {"1.1": rank.value(UnfinishedRequests()), "1.2": list(rank.value(RequestCounts()))}
    rank.append([])
    seen["1.3"] = list(rank.value(RequestCounts()))
    for turn in (1, 2):
        rank.value(Schedule())
        assert [ended.turn for ended in rank.turns] == list(range(1, turn + 1))
        rank.value(UpdateFromOutput(sampled_token_ids={}))
    return seen | {"1.4": [[ended.turn, ended.reason] for ended in rank.turns]}


def limits() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3], max_tokens=10)
    rank.sample(*[1] * 10)
    seen: dict[str, Any] = {"2.1": [len(rank.tokens), rank.turns[0].reason]}
    rank.append([4, 5, 6], max_tokens=10)
    rank.value(Schedule())
    seen["2.2"] = rank.value(MinRemainingOutput())
    rank.value(UpdateFromOutput(sampled_token_ids={"session": [1]}))
    rank.sample(*[1] * 4)
    rank.stop(2, 5)
    rank.append([7, 8, 9], max_tokens=10)
    rank.value(Schedule())
    return seen | {"2.3": rank.value(MinRemainingOutput())}


def after_no_output() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3])
    rank.without_output()
    rank.append([4, 5, 6], max_tokens=10)
    waiting = [rank.value(UnfinishedRequests()), list(rank.value(RequestCounts()))]
    (new,) = rank.value(Schedule())["scheduled_new_reqs"]
    return {
        "3.1": new["prompt_token_ids"],
        "3.2": rank.value(TokenCount()),
        "3.3": rank.value(MinRemainingOutput()),
        "3.4": waiting,
    }


def features() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3], features=(MultimodalFeature(hash="a", offset=1, length=1),))
    rank.without_output()
    rank.append([4, 5, 6, 7], features=(MultimodalFeature(hash="b", offset=2, length=1),))
    (new,) = rank.value(Schedule())["scheduled_new_reqs"]
    one, two = new["mm_features"]
    return {"4.1": len(new["mm_features"]), "4.2": one["offset"], "4.3": two["offset"]}


def close() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3])
    rank.without_output()
    (outputs,) = [message for message in rank.append([0], max_tokens=1, close=True) if isinstance(message, Outputs)]
    (ended,) = outputs.ended
    finished = rank.value(Schedule())["finished_req_ids"]
    (error,) = [message for message in rank.append([1]) if isinstance(message, Error)]
    gone = "not known" if "is not known" in error.message else error.message
    counts = list(rank.value(RequestCounts()))
    return {"5.1": [ended.reason, finished], "5.2": [rank.value(UnfinishedRequests()), counts, gone]}


def at_once() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3])
    rank.without_output()
    before = rank.value(UnfinishedRequests())
    rank.append([4, 5])
    after = rank.value(UnfinishedRequests())
    (new,) = rank.value(Schedule())["scheduled_new_reqs"]
    return {"6.1": [before, after], "6.2": new["prompt_token_ids"], "6.3": list(rank.value(RequestCounts()))}


def after_output() -> dict[str, Any]:
    rank = Rank()
    rank.open([1, 2, 3], max_tokens=2)
    rank.sample(10, 11)
    rank.append([4, 5])
    seen: dict[str, Any] = {"7.1": rank.value(TokenCount()), "7.3": rank.value(PendingPrefillTokens())}
    schedule = rank.value(Schedule())
    (new,) = schedule["scheduled_new_reqs"]
    return seen | {
        "7.2": new["prompt_token_ids"],
        "7.4": new["num_computed_tokens"],
        "7.5": schedule["num_scheduled_tokens"]["session"],
    }


def life() -> dict[str, Any]:
    rank = Rank()
    bus = _on_the_step_bus()
    rank.open([1, 2, 3])
    first = rank.value(Schedule())
    (new,) = first["scheduled_new_reqs"]
    emitted = rank.value(UpdateFromOutput(sampled_token_ids={"session": [10]}))
    seen: dict[str, Any] = {
        "8.1": len(first["scheduled_new_reqs"]),
        "8.2": new["prompt_token_ids"],
        "8.3": first["num_scheduled_tokens"]["session"],
        "8.4": first["scheduled_cached_reqs"]["req_ids"],
        "8.5": emitted["session"]["finish_reason"],
        "8.6": list(rank.value(RequestCounts())),
        "8.7": rank.value(TokenCount()),
        "8.8": bus["after the first token"],
    }
    second = rank.value(Schedule())
    cached = second["scheduled_cached_reqs"]
    emitted = rank.value(UpdateFromOutput(sampled_token_ids={"session": [STOP]}))
    seen |= {
        "9.1": len(second["scheduled_new_reqs"]),
        "9.2": cached["req_ids"],
        "9.3": second["num_scheduled_tokens"]["session"],
        "9.4": len(new["prompt_token_ids"]) + cached["num_output_tokens"][0],
        "9.5": emitted["session"]["finish_reason"],
        "9.6": rank.value(UnfinishedRequests()),
        "9.7": list(rank.value(RequestCounts())),
        "9.8": [emitted["session"]["new_token_ids"], rank.turns[0].context_tokens],
        "9.9": bus["after the stop token"],
    }
    rank.append([4, 5])
    seen["10.1"] = [rank.value(UnfinishedRequests()), list(rank.value(RequestCounts()))]
    third = rank.value(Schedule())
    (again,) = third["scheduled_new_reqs"]
    held = rank.value(TokenCount())
    return seen | {
        "10.2": len(third["scheduled_new_reqs"]),
        "10.3": again["prompt_token_ids"],
        "10.4": third["num_scheduled_tokens"]["session"],
        "10.5": held,
        "10.6": held - len(again["prompt_token_ids"]),
        "10.7": bus["after the append"],
        "10.8": bus["of the append"],
    }


def _on_the_step_bus() -> dict[str, list[int]]:
    """The same life with an executor; what was sent to it, looked at again later."""
    rank = Rank(single_step=False)

    def schedule(number: int) -> PartialSchedule:
        return next(message for message in rank.sent if isinstance(message, PartialSchedule) and message.step == number)

    def result(step: int, token: int) -> None:
        rank.give(Received(EXECUTOR, StepResult(step=step, tokens=pack_ints([token]))))

    rank.open([1, 2, 3])
    prompt = schedule(0).new[0].prompt_token_ids
    seen = {}
    result(0, 10)
    seen["after the first token"] = unpack_ints(prompt).tolist()
    result(1, STOP)
    seen["after the stop token"] = unpack_ints(prompt).tolist()
    rank.append([4, 5])
    (more,) = schedule(2).continued
    result(2, 7)
    result(3, STOP)
    assert (more.drop, len(rank.turns)) == (1, 2)
    return seen | {
        "after the append": unpack_ints(prompt).tolist(),
        "of the append": unpack_ints(more.token_ids).tolist(),
    }


PARTS = (two_openings, limits, after_no_output, features, close, at_once, after_output, life)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_what_is_observed_is_what_the_document_says(part: Any) -> None:
    seen = part()
    table = stated()
    assert seen == {number: table[number] for number in seen}


def test_every_line_of_the_document_is_observed() -> None:
    assert sorted(number for part in PARTS for number in part()) == sorted(stated())
