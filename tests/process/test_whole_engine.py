"""All processes together, with two frontends: what they share, and what one of them cannot do to the others."""

import asyncio
import base64
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from transformers import AutoModelForCausalLM

from bench.soak_sessions import Plan, run
from bus.messages import GetPauseState, MakeStats, Pooling, RequestCounts, Resume, SetPause, TokenCount
from bus.wire import unpack_floats
from frontend.client import AsyncClient, Client, EngineError
from tests.e2e.conftest import metrics
from tests.engine import ROOT, START_S, Engine
from tests.executor.test_pooling import vector_of

SILENCE_S = 4.0
"""A process that was killed, or is stopped, is taken for lost after this long."""
IDLE_S = 2.0
"""How long a session waits for its client, once that is lost."""
DEADLINE_S = 60.0
PROMPTS = [[5], list(range(20, 37)), [200, 3, 100, 77, 30] * 6, [9] * 40]

pytestmark = pytest.mark.timeout(240)  # the first test starts what all of them use


@pytest.fixture(scope="module")
def engine(tiny_model: Path, engine_cache: Path) -> Iterator[Engine]:
    with Engine(
        tiny_model,
        engine_cache,
        frontends=2,
        max_num_seqs=4,
        num_blocks=129,
        heartbeat_interval_s=0.5,
        heartbeat_timeout_s=SILENCE_S,
        session_idle_s=IDLE_S,
    ) as engine:
        engine.start()
        engine.wait_ready()
        wait_for_ranks(engine)
        yield engine
        engine.check_running()


LONG = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "text_output": False}
FEW = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


class Raw:
    """A start of client 77 of frontend 0, with nothing but frames."""

    def __init__(self, context: zmq.Context, engine: Engine) -> None:  # type: ignore[type-arg]
        self._incarnation, self._frontend = time.time_ns(), 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, round(DEADLINE_S * 1000))
        self.socket.setsockopt(zmq.IDENTITY, f"client/77/{self._incarnation:x}".encode())
        self.socket.connect(engine.config.client_endpoint(0))
        self.send(type="Hello", role="client", index=77, incarnation=self._incarnation, major=1, minor=0)
        self._frontend = self.until("Welcome")["incarnation"]

    def send(self, **message: Any) -> None:
        envelope = struct.pack("<QQ", self._incarnation, self._frontend)
        self.socket.send_multipart([envelope, msgspec.msgpack.encode(message)])

    def until(self, kind: str) -> dict[str, Any]:
        """The next message of this type; others are passed over."""
        while True:
            message: dict[str, Any] = msgspec.msgpack.decode(self.socket.recv_multipart()[1])
            if message["type"] == kind:
                return message


def client_of(engine: Engine, frontend: int) -> Client:
    return Client(engine.config.client_endpoint(frontend), timeout_s=DEADLINE_S)


def tokens(client: Client, prompt: list[int], count: int = 24, **options: Any) -> list[int]:
    options = {"text_output": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": count, **options}
    return client.complete(prompt, **options)[0].token_ids


def prompt_values(pieces: list[Any]) -> list[float]:
    """Log-probabilities of a prompt's tokens, from its second on, which came before the first token."""
    values: list[float] = []
    for number, piece in enumerate(pieces):
        found = piece.delta.logprobs if piece.delta is not None else None
        if found is not None and found.prompt_position:
            assert not any(before.token_ids for before in pieces[:number])
            assert found.prompt_position == len(values) + 1
            values += unpack_floats(found.values).reshape(found.positions, -1)[:, 0].tolist()
    return values


def test_prompts_have_log_probabilities_however_they_are_asked_for(engine: Engine) -> None:
    """By tokens and by text, over both buses' ways and HTTP; in chunks, and with the whole prompt in the cache."""
    text = "a prompt of more tokens than a step of this engine has, which is 64, in two chunks and some letters" * 2
    asked = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": 1}
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0.0, "return_token_ids": True}
    url = f"http://{engine.config.host}:{engine.port()}/v1/completions"
    data = json.dumps(body | {"ignore_eos": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        (choice,) = json.load(response)["choices"]
    none, *expected = choice["logprobs"]["token_logprobs"][:-2]
    assert none is None
    prompt = choice["prompt_token_ids"]
    assert len(prompt) == len(expected) + 1 > engine.config.max_num_batched_tokens
    offsets = choice["logprobs"]["text_offset"]
    pairs = zip(choice["logprobs"]["tokens"][:-2], offsets, strict=False)
    assert "".join(token for token, _ in pairs) == text
    assert offsets[:3] == [0, 1, 2]
    with client_of(engine, 0) as client:
        for options in ({"text_output": False}, {}, {"rank": 1, "text_output": False}):
            pieces = list(client.generate(prompt, **asked, **options))
            assert prompt_values(pieces) == pytest.approx(expected, abs=2e-4)
            given = [token for piece in pieces for token in piece.token_ids]
            assert given == choice["token_ids"]
    for kind in (Client, Late):
        refused = pytest.raises(EngineError, match="not available in a session")
        with kind(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as client, refused:
            list(client.session(prompt, **asked).first)


def post(engine: Engine, path: str, **body: Any) -> tuple[int, Any]:
    """Status and JSON of an answer over HTTP."""
    url = f"http://{engine.config.host}:{engine.port()}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def embeddings(engine: Engine, **body: Any) -> np.ndarray:
    """Those of an answer to `/v1/embeddings`, in order."""
    status, answer = post(engine, "/v1/embeddings", **body)
    assert status == 200, answer
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]])


def test_embeddings_are_those_of_transformers_over_http_and_the_client_bus(engine: Engine, tiny_model: Path) -> None:
    """Of several chunks and of one token, on either rank, beside requests that draw, with all of it in the cache.

    Over HTTP, vLLM wants room for a token of output.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    prompts = [list(range(20, 170)), [5], [9] * 1024]
    last, mean = ([vector_of(model, prompt, Pooling(kind=kind)) for prompt in prompts] for kind in ("last", "mean"))
    longest = [vector_of(model, [9] * 1023, Pooling(kind="last"))]
    for options in ({"input": [9] * 1023}, {"input": [9] * 2000, "truncate_prompt_tokens": -1}):
        np.testing.assert_allclose(embeddings(engine, **options), longest, atol=2e-4)
    with client_of(engine, 0) as client, client_of(engine, 1) as other:
        expected = tokens(client, PROMPTS[1])
        running = [other.generate(PROMPTS[1], **LONG, rank=rank) for rank in (0, 1)]
        for _ in range(2):
            np.testing.assert_allclose(embeddings(engine, input=prompts[:2]), last[:2], atol=2e-4)
            for rank in (0, 1):
                np.testing.assert_allclose(client.embed(*prompts, rank=rank), last, atol=2e-4)
                np.testing.assert_allclose(client.embed(*prompts, pooling="mean", rank=rank), mean, atol=2e-4)
        for stream in running:
            assert [token for piece in stream for token in piece.token_ids] == expected
        bare = client.embed(prompts[0], pooling="mean", normalize=False)
        wanted = vector_of(model, prompts[0], Pooling(kind="mean", normalize=False))
        np.testing.assert_allclose(bare, [wanted], atol=2e-4)
        chat = [{"role": "user", "content": "hello"}]
        text, turn = client.embed("a prompt", chat)
        np.testing.assert_allclose(embeddings(engine, input=["a prompt"]), [text], atol=2e-4)
        np.testing.assert_allclose(embeddings(engine, messages=chat), [turn], atol=2e-4)
        asyncio.run(embed_at_once(engine, prompts, mean))
        refused(lambda: client.embed([5], [259]), "token id 259 is not in the vocabulary; ids go from 0 to 258")
        refused(lambda: client.embed([5] * 1025), "the prompt has 1025 tokens; .* it may have 1024")
        refused(lambda: client.embed("x", pooling="cls"), r"Invalid enum value 'cls' - at `\$.pooling`")
        refused(lambda: client.embed(""), "the prompt is empty")
    check_idle(engine)


async def embed_at_once(engine: Engine, prompts: list[list[int]], expected: list[np.ndarray]) -> None:
    """All prompts several times over, side by side, of which some are given up."""
    async with AsyncClient(engine.config.client_endpoint(1), timeout_s=DEADLINE_S) as client:
        given_up = [asyncio.create_task(client.embed(*prompts, pooling="mean")) for _ in range(3)]
        asked = [client.embed(*prompts, pooling="mean") for _ in range(3)]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        for found in await asyncio.gather(*asked):
            np.testing.assert_allclose(found, expected, atol=2e-4)


def refused(ask: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        ask()


def test_embeddings_over_http_have_their_formats_uses_and_refusals(engine: Engine) -> None:
    status, answer = post(engine, "/v1/embeddings", input=[[5, 6, 7], [8]], encoding_format="base64")
    assert status == 200
    found = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]])
    np.testing.assert_allclose(found, embeddings(engine, input=[[5, 6, 7], [8]]), atol=2e-4)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (4, 4)
    status, answer = post(engine, "/pooling", input=[5, 6, 7], use_activation=False)
    bare = np.array(answer["data"][0]["data"])
    np.testing.assert_allclose(bare / np.linalg.norm(bare), found[0], atol=2e-4)
    texts = ["a cat", "a dog", "anything else"]
    vectors = embeddings(engine, input=texts)
    cosines = vectors @ vectors[0]
    for path in ("/score", "/v1/score"):
        status, answer = post(engine, path, text_1=texts[0], text_2=texts)
        np.testing.assert_allclose([item["score"] for item in answer["data"]], cosines, atol=2e-4)
    status, answer = post(engine, "/rerank", query=texts[0], documents=texts)
    assert [item["index"] for item in answer["results"]] == np.argsort(-cosines).tolist()
    for path, body, words in (
        ("/v1/embeddings", {"input": "x", "dimensions": 4}, "dimensions must be unset"),
        ("/v1/embeddings", {"input": [5] * 1024}, "1024"),
        ("/v1/embeddings", {"input": [5] * 1025}, "1025"),
        ("/v1/embeddings", {"input": [[259]]}, "259 is out of vocabulary"),
        ("/v1/embeddings", {"input": []}, "at least one prompt"),
        ("/v1/embeddings", {"input": "x", "inputs": "y"}, "did you mean 'input'?"),
        ("/pooling", {"input": "x", "task": "token_embed"}, "Unsupported task"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "lengths"),
    ):
        status, answer = post(engine, path, **body)
        assert status == 400
        assert words in answer["error"]["message"]


class Late(Client):
    """Goes on after it has opened a session when it has heard that there is none."""

    def _pump(self, timeout_s: float) -> bool:
        arrived = super()._pump(timeout_s)
        while timeout_s == 0 and not all(stream.over for stream in self._conversation.sessions.values()):
            super()._pump(DEADLINE_S)
        return arrived


class Streaming(threading.Thread):
    """A request for as many tokens as there is room for, read on a thread. `flows` is set once the first has come."""

    def __init__(self, engine: Engine, frontend: int, rank: int) -> None:
        super().__init__(daemon=True)
        self.flows = threading.Event()
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self._client = client_of(engine, frontend)
        self._rank = rank
        self.start()
        assert self.flows.wait(DEADLINE_S), engine.tails()

    def run(self) -> None:
        stream = self._client.generate([7, 8, 9], text_output=False, temperature=0.0, ignore_eos=True, rank=self._rank)
        try:
            for piece in stream:
                self.tokens += piece.token_ids
                self.flows.set()
        except (EngineError, TimeoutError) as error:
            self.error = error
        finally:
            self._client.close()


def check_idle(engine: Engine) -> None:
    """Nothing is left of any request, anywhere."""
    for frontend in (0, 1):
        with client_of(engine, frontend) as client:
            engine.wait_until(
                lambda client=client: client.command(RequestCounts()).value == [0, 0],  # type: ignore[misc]
                f"frontend {frontend} hears that ranks are idle",
                DEADLINE_S,
            )
            assert client.command(TokenCount()).value == [0, 0]


def test_frontends_share_the_ranks_and_each_gets_what_it_asked_for(engine: Engine) -> None:
    with client_of(engine, 0) as first, client_of(engine, 1) as second:
        alone = [tokens(first, prompt) for prompt in PROMPTS]
        got: dict[tuple[int, int], list[int]] = {}

        def ask(frontend: int, client: Client) -> None:
            for place, prompt in enumerate(PROMPTS):
                got[frontend, place] = tokens(client, prompt, rank=(frontend + place) % 2)

        asking = [threading.Thread(target=ask, args=pair) for pair in ((0, first), (1, second))]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(DEADLINE_S)
    assert got == {(frontend, place): answer for frontend in (0, 1) for place, answer in enumerate(alone)}
    check_idle(engine)


def test_both_ways_to_ask_give_the_same_answer_at_both(engine: Engine) -> None:
    with client_of(engine, 0) as first, client_of(engine, 1) as second:
        asked = [(client, text_output) for client in (first, second) for text_output in (False, True)]
        assert len({tuple(tokens(client, PROMPTS[1], text_output=text_output)) for client, text_output in asked}) == 1


def test_each_metric_has_one_exporter(engine: Engine) -> None:
    for frontend in (0, 1):
        with client_of(engine, frontend) as client:
            tokens(client, PROMPTS[1])
    for name in ("rankbus_rank_num_blocks", "vllm:num_requests_running", "vllm:prefix_cache_queries_total"):
        assert metrics(engine, name, frontend=0)
        assert not metrics(engine, name, frontend=1)
    assert not metrics(engine, "rankbus_executor_steps_total", frontend=1)
    for frontend in (0, 1):
        (labels,) = metrics(engine, "rankbus_frontend_requests_started_total", frontend)
        assert f'frontend="{frontend}"' in labels


def test_a_pause_told_to_one_holds_for_the_other(engine: Engine) -> None:
    with client_of(engine, 0) as first, client_of(engine, 1) as second:
        assert first.command(SetPause(mode="keep")).value == "paused_all"
        assert second.command(GetPauseState()).value == "paused_all"
        done: list[list[int]] = []
        thread = threading.Thread(target=lambda: done.append(tokens(second, PROMPTS[1])))
        thread.start()
        try:
            while first.command(RequestCounts()).value != [0, 1]:
                assert thread.is_alive(), "it was served in a pause"
        finally:
            assert first.command(Resume()).value == "unpaused"
        thread.join(DEADLINE_S)
    assert done


def test_one_ends_and_the_other_serves_on(engine: Engine) -> None:
    with client_of(engine, 0) as first:
        assert engine.stop("frontend-1") == {"frontend-1": 0}
        alone = tokens(first, PROMPTS[1])
        assert len(alone) == 24
    engine.start("frontend-1")
    engine.wait_ready()
    wait_for_ranks(engine)
    with client_of(engine, 1) as second:
        assert tokens(second, PROMPTS[1]) == alone
    check_idle(engine)


def test_a_seed_draws_the_same_alone_on_another_rank_in_company_and_after_preemption(engine: Engine) -> None:
    drawn = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.5, "seed": 77}

    async def together() -> list[list[int]]:
        async with AsyncClient(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as client:
            options = {"text_output": False, "ignore_eos": True, "max_tokens": 300, "rank": 0, **drawn}
            done = await asyncio.gather(*(client.complete(PROMPTS[1], **options) for _ in range(6)))
        return [completions[0].token_ids for completions in done]

    with client_of(engine, 0) as client:
        alone = tokens(client, PROMPTS[1], 300, rank=0, **drawn)
        assert tokens(client, PROMPTS[1], 300, rank=1, **drawn) == alone
        client.command(MakeStats())
        assert asyncio.run(together()) == [alone] * 6
        assert client.command(MakeStats()).value["num_preemptions"] > 0  # the pool holds three of them


def test_a_reader_may_leave_after_its_client(engine: Engine) -> None:
    client = client_of(engine, 0)
    stream = client.generate(PROMPTS[1], **{**LONG, "max_tokens": 900})
    next(iter(stream))
    client.close()
    stream.close()  # type: ignore[attr-defined]
    check_idle(engine)


def test_a_frontend_that_is_killed_takes_only_its_own_requests_along(engine: Engine) -> None:
    its_own, another_s = Streaming(engine, 1, rank=0), Streaming(engine, 0, rank=0)
    holder = client_of(engine, 1)
    held = holder.session([5], text_output=False, **FEW)
    held.first.end()
    engine.stop("frontend-1", by=signal.SIGKILL)
    another_s.join(DEADLINE_S)
    assert another_s.error is None
    assert len(another_s.tokens) == 1024 - 3
    with client_of(engine, 0) as client:
        engine.wait_until(lambda: client.command(RequestCounts()).value == [0, 0], "its requests ended", DEADLINE_S)
    engine.start("frontend-1")
    engine.wait_until(lambda: engine.healthy(1), "frontend-1 is back", START_S)
    with client_of(engine, 1) as client:
        assert tokens(client, [7, 8, 9]) == another_s.tokens[:24]
    assert its_own.tokens == another_s.tokens[: len(its_own.tokens)]
    with pytest.raises(EngineError, match="the frontend was lost, and the session with it"):
        held.append([6]).end()
    holder.close()
    check_idle(engine)


def test_a_rank_that_stands_still_holds_nobody_back(engine: Engine) -> None:
    stuck = Streaming(engine, 0, rank=1)
    engine["rank-1"].send_signal(signal.SIGSTOP)
    try:
        with client_of(engine, 1) as client:
            assert len(tokens(client, [1, 2, 3], 200, rank=0)) == 200
        stuck.join(DEADLINE_S)
        assert isinstance(stuck.error, EngineError)
        assert "send the request again" in str(stuck.error)
    finally:
        engine["rank-1"].send_signal(signal.SIGCONT)
    serve_again(engine, lambda client: tokens(client, [7, 8, 9], rank=1))
    check_idle(engine)


@pytest.mark.parametrize("name", ["rank-1", "executor-0"])
def test_requests_end_when_what_they_need_is_killed_and_new_ones_are_served(engine: Engine, name: str) -> None:
    with client_of(engine, 0) as client:
        before = tokens(client, PROMPTS[2])
    cut = Streaming(engine, 0, rank=1)
    engine.restart(name, by=signal.SIGKILL)
    cut.join(DEADLINE_S)
    assert isinstance(cut.error, EngineError)
    assert "send it again" in str(cut.error) or "send the request again" in str(cut.error)
    serve_again(engine, lambda client: tokens(client, PROMPTS[2], rank=1) == before)
    check_idle(engine)


def test_sessions_that_need_four_times_the_kv_pool_all_end_as_they_should(engine: Engine) -> None:
    plan = Plan(sessions=50, turns=8, longest_input=48)
    report = run(engine, plan)
    assert sum(report.ends.values()) == plan.sessions
    assert set(report.ends) <= {"closed", "abort"}
    assert report.largest > 4 * 128 * 16
    assert report.turn_ends["interrupted"] > 0
    assert report.checked_tokens > 300
    check_idle(engine)


def test_a_session_is_taken_up_by_its_client_after_a_crash_and_ends_if_that_never_comes(engine: Engine) -> None:
    with zmq.Context() as context:
        first = Raw(context, engine)
        first.send(
            type="Generate", request_id="s", prompt_token_ids=[5, 6, 7], resumable=True, text_output=False, params=FEW
        )
        first.until("TurnFinished")
        first.socket.close()  # no Goodbye: as when the process is killed
        second = Raw(context, engine)
        assert (second.until("SessionResumed")["turn"], second.until("TurnFinished")["turn"]) == (1, 1)
        second.send(type="Append", request_id="s", prompt_token_ids=[8])
        assert second.until("TurnFinished")["context_tokens"] == 3 + 3 + 1 + 3
        second.socket.close()
        with client_of(engine, 0) as client:
            engine.wait_until(lambda: client.command(TokenCount()).value == [0, 0], "the session has ended", DEADLINE_S)
        third = Raw(context, engine)
        third.send(type="Append", request_id="s", prompt_token_ids=[8])
        assert third.until("Error")["code"] == "unknown_request"
        third.socket.close()
    check_idle(engine)


def test_the_dashboard_in_docs_names_metrics_that_exist(engine: Engine) -> None:
    """After all that has happened to this engine, every one of them has been counted."""
    with Client(engine.config.client_endpoint(0), timeout_s=DEADLINE_S) as client:
        client.complete("Some text", max_tokens=4, ignore_eos=True)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(engine.config.client_endpoint(0))
        socket.send_multipart([b"no", b"message"])
        assert socket.poll(round(DEADLINE_S * 1000))
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    named = set(re.findall(r"\b(?:vllm:|rankbus_)\w+", " ".join(expressions)))
    assert len(named) > 30

    def missing() -> set[str]:
        with urllib.request.urlopen(f"http://{engine.config.host}:{engine.port()}/metrics", timeout=10) as response:
            text = response.read().decode()
        return named - set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE))

    engine.wait_until(lambda: not missing(), "all metrics are there", DEADLINE_S)


def test_top_shows_a_live_engine_and_its_keys_reach_the_ranks(engine: Engine) -> None:
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    environment = os.environ | {"TERM": "xterm", "RANKBUS_RUN_DIR": str(engine.config.run_path)}
    for name in ("COLUMNS", "LINES"):  # they would say what the terminal has
        environment.pop(name, None)
    command = [sys.executable, "-m", "frontend.cli", "top", "--port", str(engine.config.port)]
    top = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = Screen(own)
    with client_of(engine, 0) as client:

        def state() -> Any:
            return client.command(GetPauseState()).value

        screen.wait_for(engine, r"ready.*rank +state.* 0 +up.* 1 +up.*executor .*steps/s")
        os.write(own, b"\x1b[B")
        screen.wait_for(engine, r"▸ +1 ")
        os.write(own, b"p")
        engine.wait_until(lambda: state() == ["unpaused", "paused_all"], "rank 1 is paused", DEADLINE_S)
        screen.wait_for(engine, r" 1 +paused .*pause rank 1: done")
        os.write(own, b"r")
        engine.wait_until(lambda: state() == "unpaused", "rank 1 goes on", DEADLINE_S)
        screen.wait_for(engine, "resume rank 1: done")
        os.write(own, b"d")
        screen.wait_for(engine, r" 1 +draining .*drain rank 1: done")
        os.write(own, b"r")
        screen.wait_for(engine, r" 1 +up .*resume rank 1: done")
    os.write(own, b"q")
    assert top.wait(DEADLINE_S) == 0
    screen.close()


class Screen:
    """What a program writes to a terminal, without the escape sequences, since the last thing that was waited for."""

    def __init__(self, terminal: int) -> None:
        self._text = ""
        self._terminal = terminal
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, engine: Engine, pattern: str) -> None:
        def found() -> bool:
            match = re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._text), re.DOTALL)
            if match:
                self._text = ""
            return match is not None

        engine.wait_until(found, f"the screen shows {pattern}", DEADLINE_S)

    def close(self) -> None:
        self._thread.join(DEADLINE_S)
        os.close(self._terminal)

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 65536):
                self._text += data.decode(errors="replace")
        except OSError:  # the program has ended
            pass


def test_each_frontend_has_a_dashboard(engine: Engine) -> None:
    for frontend in (0, 1):
        url = f"http://{engine.config.host}:{engine.port(frontend)}/dashboard"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert b"<title>rankbus</title>" in response.read()
        with urllib.request.urlopen(f"{url}/events", timeout=10) as response:
            snapshots = json.loads(response.readline().removeprefix(b"data: "))
        assert snapshots[-1]["frontend"] == frontend
        assert [rank["up"] for rank in snapshots[-1]["ranks"]] == [True, True]
        assert snapshots[-1]["executor"]["steps"] > 0
        assert any("peer down" in line[2] for line in snapshots[-1]["errors"])


def wait_for_ranks(engine: Engine) -> None:
    """Until all frontends serve with both; one is ready as soon as it has one."""
    for rank in (0, 1):
        serve_again(engine, lambda client, rank=rank: tokens(client, [5], rank=rank))  # type: ignore[misc]


def serve_again(engine: Engine, ask: Callable[[Client], Any]) -> None:
    """Wait until what `ask` does with each frontend succeeds: only refusals are borne, and only for so long."""
    for frontend in (0, 1):
        with client_of(engine, frontend) as client:

            def served(client: Client = client) -> bool:
                try:
                    return bool(ask(client))
                except EngineError as error:
                    if error.code not in ("unavailable", "failed"):
                        raise
                    return False

            engine.wait_until(served, f"frontend {frontend} is served again", START_S)
