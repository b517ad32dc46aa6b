"""The requests of a frontend's journal, and sending them again."""

from pathlib import Path

import numpy as np
import pytest

from bus.core import Drained, Peer, PeerDown, PeerUp, Received, Send, Stop, WakeAt
from bus.journal.reader import find
from bus.messages import (
    Abort,
    Append,
    Embed,
    Embedding,
    Error,
    Finished,
    Generate,
    GenerateParams,
    Pooling,
    RequestEnded,
    Sampling,
    TokenDeltas,
    TurnFinished,
)
from bus.replay_command import main
from bus.sampling import pooled
from bus.wire import pack_ints
from frontend.params import ModelLimits, sampling_for
from frontend.seam import AbortCall, AddCall, Deliver, Delivery, RenderText, TextRendered
from frontend.workload import Arrival, LoadCore, params_of, read
from tests.timed_journals import TimedJournals, received

CLIENT = Peer("client", "client", 3, 9)
FRONTEND = ("frontend", 0)
PROMPT = pack_ints([4, 5, 6])
SAMPLING = Sampling(seed=11, max_tokens=5, temperature=0.5, eos_token_id=2, stop_token_ids=[3])


def deltas(*request_ids: str) -> TokenDeltas:
    return TokenDeltas(request_ids=list(request_ids), tokens=pack_ints([7] * len(request_ids)))


def generate(request_id: str, **given: object) -> Generate:
    return Generate(request_id=request_id, prompt_token_ids=PROMPT, text_output=False, **given)  # type: ignore[arg-type]


def recorded(folder: Path) -> Path:
    """A request over the client bus, one over HTTP that is given up, a session, and a text request."""
    run = TimedJournals(folder)
    run.turn(FRONTEND, 100, 101, received(CLIENT, generate("a", params=GenerateParams(n=2, max_tokens=2))))
    add = AddCall(request_id="cmpl-1", prompt_token_ids=PROMPT, sampling=SAMPLING, rank=1, priority=4)
    run.turn(FRONTEND, 110, 111, ("posted", "AddCall", add))
    run.turn(FRONTEND, 112, 113, received(CLIENT, Generate(request_id="t", text="words")), ("RenderText", {}))
    indices = pack_ints([0, 1])
    both = TokenDeltas(request_ids=["a", "a"], tokens=pack_ints([1, 2]), indices=indices)
    run.turn(FRONTEND, 129, 130, ("drained", None, 0.0), (CLIENT, both))
    run.turn(
        FRONTEND,
        139,
        140,
        ("drained", None, 0.0),
        (CLIENT, both),
        ("Deliver", Deliver(1, [Delivery("cmpl-1", PROMPT)])),
    )
    first, last = (Finished(request_id="a", index=index, reason="length") for index in (0, 1))
    with_end = TokenDeltas(request_ids=[], tokens=pack_ints([]), finished=[last])
    run.turn(FRONTEND, 140, 141, ("drained", None, 0.0), (CLIENT, first), (CLIENT, with_end))
    run.turn(FRONTEND, 150, 151, ("posted", "AbortCall", AbortCall(request_ids=["cmpl-1", "unknown"])))
    ended = Delivery("cmpl-1", memoryview(b""), None, None, RequestEnded(handle=1, reason="abort"))
    run.turn(FRONTEND, 154, 155, ("drained", None, 0.0), ("Deliver", Deliver(1, [ended])))
    run.turn(FRONTEND, 200, 201, received(CLIENT, generate("s", resumable=True)))
    run.turn(FRONTEND, 209, 210, ("drained", None, 0.0), (CLIENT, deltas("s")))
    run.turn(
        FRONTEND, 219, 220, ("drained", None, 0.0), (CLIENT, TurnFinished(request_id="s", turn=1, reason="length"))
    )
    run.turn(FRONTEND, 300, 301, received(CLIENT, Append(request_id="s", prompt_token_ids=PROMPT)))
    run.turn(FRONTEND, 339, 340, ("drained", None, 0.0), (CLIENT, deltas("s")))
    run.turn(FRONTEND, 400, 401, received(CLIENT, Append(request_id="s", resumable=False)))
    run.turn(FRONTEND, 409, 410, ("drained", None, 0.0), (CLIENT, Finished(request_id="s", reason="stop")))
    return run.write()


def test_requests_come_with_their_times_and_names_of_their_own(tmp_path: Path) -> None:
    workload = read(find([str(recorded(tmp_path))]))
    told = [(round(1000 * at), type(message).__name__, message.request_id) for at, message in workload.arrivals]
    assert told == [
        (0, "Generate", "0"),
        (10, "Generate", "1"),
        (50, "Abort", "1"),
        (100, "Generate", "2"),
        (200, "Append", "2"),
        (300, "Append", "2"),
    ]
    http = workload.arrivals[1].message
    assert isinstance(http, Generate)
    assert (bytes(http.prompt_token_ids), http.rank, http.priority) == (bytes(PROMPT), 1, 4)  # type: ignore[arg-type]


def test_recorded_latencies(tmp_path: Path) -> None:
    latencies = read(find([str(recorded(tmp_path))])).recorded
    assert np.round(1000 * np.array(latencies.first)).tolist() == [30, 30, 10, 40]
    assert np.round(1000 * np.array(latencies.between)).tolist() == [10, 10]
    assert np.round(1000 * np.array(latencies.total)).tolist() == [41, 20, 110]
    assert (latencies.asked_for, latencies.tokens, latencies.unanswered) == (3, 9, 0)
    assert latencies.ends == {"length": 1, "abort": 1, "stop": 1}


def test_a_client_writes_what_gives_the_recorded_sampling() -> None:
    limits = ModelLimits(vocab_size=100, max_model_len=50, eos_token_ids=(2,))
    asking = Sampling(seed=1, max_tokens=4, min_tokens=2, logit_bias={3: 1.5}, logprobs=2, prompt_logprobs=1)
    for sampling in (SAMPLING, asking):
        assert sampling_for(params_of(sampling), 3, limits, sampling.seed) == sampling


def test_embeddings_are_asked_for_again_however_they_were(tmp_path: Path) -> None:
    """By a client with tokens or with a text, which becomes tokens later, and over HTTP."""
    run = TimedJournals(tmp_path)
    by_text = Embed(request_id="t", text="hello")
    rendered = TextRendered(peer=CLIENT, request=Embed(request_id="t", prompt_token_ids=PROMPT, normalize=False))
    http = AddCall(request_id="h", prompt_token_ids=PROMPT, sampling=pooled(Pooling(kind="mean")))
    vector = memoryview(b"0123")
    told = [(CLIENT, Embedding(request_id=name, vector=vector)) for name in "et"]
    end = Delivery("h", memoryview(b""), ended=RequestEnded(handle=1, reason="stop"), vector=vector)
    run.turn(FRONTEND, 0, 1, received(CLIENT, Embed(request_id="e", prompt_token_ids=PROMPT, pooling="last")))
    run.turn(FRONTEND, 5, 6, received(CLIENT, by_text), ("RenderText", RenderText(CLIENT, by_text)))
    run.turn(FRONTEND, 10, 11, ("posted", "TextRendered", rendered))
    run.turn(FRONTEND, 20, 21, ("posted", "AddCall", http))
    run.turn(FRONTEND, 29, 30, ("drained", None, 0.0), *told, ("Deliver", Deliver(1, [end])))
    workload = read(find([str(run.write())]))
    asked = [message for _, message in workload.arrivals if isinstance(message, Embed)]
    assert [(message.pooling, message.normalize) for message in asked] == [
        ("last", True),
        (None, False),
        ("mean", True),
    ]
    assert all(message.prompt_token_ids == PROMPT and message.text is None for message in asked)
    assert (workload.recorded.ends, workload.recorded.unanswered) == ({"stop": 3}, 0)
    bench = Bench(*workload.arrivals)
    bench.core.handle(PeerUp(CLIENT))
    assert len(bench.drain(after=1.0)) == 3
    for message in asked:
        bench.hear(Embedding(request_id=message.request_id, vector=vector), after=0.1)
    assert bench.drain() == [Stop("all requests have ended")]
    assert bench.core.latencies.ends == {"stop": 3}


class Bench:
    """A `LoadCore` with a clock that stands still."""

    def __init__(self, *arrivals: Arrival, speed: float = 1.0) -> None:
        self.now = 50.0
        self.core = LoadCore(list(arrivals), speed, lambda: self.now, connect_s=10, patience_s=60)

    def drain(self, after: float = 0.0) -> list[object]:
        self.now += after
        return list(self.core.handle(Drained(self.now)))

    def hear(self, message: object, after: float) -> None:
        self.now += after
        assert not list(self.core.handle(Received(CLIENT, message)))  # type: ignore[arg-type]


def test_requests_are_sent_at_their_times_and_timed() -> None:
    one, two = generate("0"), generate("1")
    bench = Bench(Arrival(0.0, one), Arrival(1.0, two), Arrival(2.0, Abort(request_id="0")), speed=2.0)
    bench.core.handle(PeerUp(CLIENT))
    assert bench.drain() == [Send(CLIENT, one), WakeAt(50.5)]
    bench.hear(deltas("0"), after=0.3)
    assert bench.drain() == [WakeAt(50.5)]
    assert bench.drain(after=0.25) == [Send(CLIENT, two), WakeAt(51.0)]
    bench.hear(deltas("0", "1", "other"), after=0.1)
    assert bench.drain(after=0.35) == [Send(CLIENT, Abort(request_id="0"))]
    bench.hear(Finished(request_id="0", reason="abort"), after=0.1)
    assert bench.drain() == []
    bench.hear(Error(code="invalid", message="too long", request_id="1", turn=3), after=0.0)
    assert bench.drain() == []  # a turn was refused, the session goes on
    bench.hear(Error(code="unavailable", message="no rank", request_id="1"), after=0.1)
    assert bench.drain() == [Stop("all requests have ended")]
    latencies = bench.core.latencies
    assert latencies.first == pytest.approx([0.3, 0.1])
    assert latencies.between == pytest.approx([0.35])
    assert latencies.total == []
    assert latencies.ends == {"abort": 1, "unavailable": 1}
    assert bench.core.behind_s == pytest.approx(0.05)
    assert bench.core.seconds == pytest.approx(1.2)


def test_silence_and_loss_end_it() -> None:
    bench = Bench(Arrival(0.0, generate("0")))
    assert bench.drain(after=9) == []
    assert bench.drain(after=2) == [Stop("no frontend answers")]
    bench.core.handle(PeerUp(CLIENT))
    assert bench.drain() == [Send(CLIENT, generate("0"))]
    assert bench.drain(after=59) == []
    assert bench.drain(after=2) == [Stop("nothing was heard for 60 s")]
    assert bench.core.latencies.unanswered == 1
    assert bench.core.handle(PeerDown(CLIENT, "it ended")) == [Stop("the frontend was lost: it ended")]


def test_journals_without_requests_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = TimedJournals(tmp_path)
    run.turn(("rank", 0), 0, 1, ("drained", None, 0.0))
    run.turn(FRONTEND, 0, 1, ("drained", None, 0.0))
    assert main(["load", str(run.write())]) == 2
    assert "there is no request in these journals" in capsys.readouterr().err
    assert main(["load", f"{tmp_path}/nothing"]) == 2
