"""vLLM's HTTP server on the seam: one server process for all tests here, on a core that is a script."""

import gzip
import http.client
import http.server
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import ROOT
from tests.frontend.toy_server import FAILS, REFUSED, STALLS

DEADLINE_S = 60.0


class Traces(http.server.ThreadingHTTPServer):
    """Takes OpenTelemetry traces over HTTP and keeps them as they come (protobuf)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), TracesHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class TracesHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Traces)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.bodies.put(body)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


class Server:
    """A toy server's process. `calls` has what its core was asked, as it comes."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._log = log
        self.traces = Traces()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.frontend.toy_server", str(model), str(self.port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ
            | {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1", "TOY_TRACES": self.traces.url}
            | {"TOY_SETTINGS": json.dumps({"tool_call_parser": "hermes"})}
            | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"},
        )
        self.calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._wait_up()

    def tell(self, **order: Any) -> None:
        """Give the core an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def get(self, path: str) -> tuple[int, str]:
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def start(self, path: str, body: Any, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
        """Send a request; the response begins when there is one, and may be a stream."""
        connection = self.connect()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))
        return connection.getresponse()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        response = self.start(path, body, headers)
        return response.status, json.loads(response.read())

    def complete(self, **body: Any) -> Any:
        """A completion of two greedy tokens, unless `body` says otherwise."""
        status, answer = self.post("/v1/completions", {"prompt": "abcdef", "temperature": 0} | body)
        assert status == 200, answer
        return answer

    def wait_call(self, name: str) -> dict[str, Any]:
        """The next call of this name."""
        until = time.monotonic() + DEADLINE_S
        while True:
            call = self.calls.get(timeout=until - time.monotonic())
            if call["call"] == name:
                return call

    def forget_calls(self) -> None:
        while not self.calls.empty():
            self.calls.get()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.calls.put(json.loads(line))

    def _wait_up(self) -> None:
        until = time.monotonic() + DEADLINE_S
        tried = threading.Event()
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/v1/models")
                return
            except ConnectionRefusedError:
                tried.wait(0.1)
        self.process.kill()
        raise AssertionError(f"the server did not come up:\n{self._log.read_text()}")


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tiny_model, tmp_path_factory.mktemp("log") / "server.log")
    yield server
    server.process.terminate()
    assert server.process.wait(10) == 0


@pytest.fixture
def server(running: Server) -> Server:
    running.tell(ready=True)
    running.forget_calls()
    return running


def events(response: http.client.HTTPResponse) -> list[Any]:
    """The JSON objects of a stream, which must end as it should."""
    lines = [line.decode().strip() for line in response if line.strip()]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_models_and_tokens(server: Server) -> None:
    models = json.loads(server.get("/v1/models")[1])
    assert [model["id"] for model in models["data"]] == ["tiny"]
    status, tokens = server.post("/tokenize", {"prompt": "abc"})
    assert (status, tokens["count"]) == (200, 3)
    assert server.post("/detokenize", {"tokens": tokens["tokens"]})[1] == {"prompt": "abc"}


def test_completion(server: Server) -> None:
    answer = server.complete()
    assert answer["choices"][0]["text"] == "abcdef"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 7)
    answer = server.complete(max_tokens=2)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ab", "length")


def test_chat_and_stream_are_the_same(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200
    text = answer["choices"][0]["message"]["content"]
    assert "hello" in text
    pieces = events(server.start("/v1/chat/completions", body | {"stream": True}))
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_parameters_reach_the_core(server: Server) -> None:
    server.complete(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=3,
        max_tokens=5,
        seed=11,
        stop_token_ids=[9],
        logit_bias={"5": 2},
        allowed_token_ids=[5, 6],
        bad_words=["xy"],
        ignore_eos=True,
        cache_salt="salt",
    )
    call = server.wait_call("AddCall")
    assert call["cache_salt"] == "salt"
    sampling = call["sampling"]
    assert sampling.pop("bad_words_token_ids")
    assert sampling == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "max_tokens": 5,
        "seed": 11,
        "stop_token_ids": [9],
        "logit_bias": {"5": 2.0},
        "allowed_token_ids": [5, 6],
    }


SAMPLED = {"temperature": 0.5, "top_k": 7, "top_p": 0.9}
PENALIZED = {"min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "same"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 5, "logit_bias": {"5": 2.0}, "bad_words": ["xy"]},
            SAMPLED | PENALIZED | {"min_tokens": 3, "seed": 11, "stop_token_ids": [9], "allowed_token_ids": [5, 6]},
        ),
        (
            "/v1/responses",
            {"input": "x", "max_output_tokens": 5, "logit_bias": {"5": 2.0}},
            SAMPLED | PENALIZED | {"seed": 11, "stop_token_ids": [9]},
        ),
        ("/v1/messages", {"model": "tiny", "messages": MESSAGES}, SAMPLED | {"max_tokens": 5}),
    ],
)
def test_parameters_reach_the_core_from_chat_too(server: Server, path: str, body: Any, same: Any) -> None:
    status, answer = server.post(path, body | same | {"cache_salt": "salt"})
    assert status == 200, answer
    call = server.wait_call("AddCall")
    assert call["cache_salt"] == "salt"
    sampling = call["sampling"]
    assert {name: sampling[name] for name in same} == same
    assert sampling["max_tokens"] == 5
    assert sampling.get("logit_bias") == body.get("logit_bias")
    assert bool(sampling.get("bad_words_token_ids")) == ("bad_words" in body)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_found_in_answers(server: Server, stream: bool) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    body = {"messages": [{"role": "user", "content": call}], "tools": [TOOL], "temperature": 0, "stream": stream}
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(server.start("/v1/chat/completions", body))]
        calls = [found["function"] for delta in deltas for found in delta.get("tool_calls") or []]
    else:
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        calls = [found["function"] for found in answer["choices"][0]["message"]["tool_calls"]]
    assert "".join(part.get("name") or "" for part in calls) == "weather"
    assert json.loads("".join(part.get("arguments") or "" for part in calls)) == {"city": "Paris"}


def test_rank_is_pinned_by_header(server: Server) -> None:
    status, _ = server.post("/v1/completions", {"prompt": "a"}, {"X-data-parallel-rank": "1"})
    assert status == 200
    assert server.wait_call("AddCall")["rank"] == 1
    status, answer = server.post("/v1/completions", {"prompt": "a"}, {"X-data-parallel-rank": "2"})
    assert status == 400
    assert "out of range [0, 2)" in answer["error"]["message"]


def test_stop_string_ends_the_request_below(server: Server) -> None:
    answer = server.complete(stop=["cd"])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
    stalled = server.complete(stop=["b"], priority=STALLS)
    assert stalled["choices"][0]["text"] == "a"
    request_id = server.wait_call("AddCall")["request_id"]
    assert request_id != server.wait_call("AddCall")["request_id"]
    server.wait_call("AbortCall")


def test_children_have_seeds_of_their_own(server: Server) -> None:
    unseeded = server.complete(temperature=1, n=3)
    assert len({choice["text"] for choice in unseeded["choices"]}) == 3
    assert len({server.wait_call("AddCall")["sampling"]["seed"] for _ in range(3)}) == 3
    seeded = [server.complete(temperature=1, n=3, seed=5) for _ in range(2)]
    texts = [choice["text"] for choice in seeded[0]["choices"]]
    assert texts == [choice["text"] for choice in seeded[1]["choices"]]
    assert server.complete(temperature=1, seed=6)["choices"][0]["text"] == texts[1]


def test_logprobs(server: Server) -> None:
    logprobs = server.complete(logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-2.5] * 7
    assert len(logprobs["top_logprobs"][0]) == 3
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "logprobs": True, "top_logprobs": 1}
    _, answer = server.post("/v1/chat/completions", body)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["logprob"] == -2.5
    assert len(first["top_logprobs"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_log_probabilities(server: Server, stream: bool) -> None:
    body = {"prompt": "abcdef", "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 2}
    if stream:
        found = [event["choices"][0] for event in events(server.start("/v1/completions", body | {"stream": True}))]
        parts = [choice["logprobs"] for choice in found if choice["logprobs"]]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        (choice,) = server.complete(**body)["choices"]
        assert choice["text"] == "abcdefab"
        logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abcdefab")
    assert logprobs["text_offset"] == list(range(8))
    assert logprobs["token_logprobs"] == [None, -1, -2, -3, -4, -5, -2.5, -2.5]
    assert logprobs["top_logprobs"][:3] == [None, {"b": -1, "c": -1.5}, {"c": -2, "d": -2.5}]


def test_prompt_logprobs(server: Server) -> None:
    (choice,) = server.complete(prompt_logprobs=0, n=1)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert [next(iter(of.values()))["logprob"] for of in choice["prompt_logprobs"][1:]] == [-1, -2, -3, -4, -5]
    status, answer = server.post("/v1/completions", {"prompt": "abc", "prompt_logprobs": -1})
    assert (status, answer["error"]["code"]) == (400, 400)
    assert "max allowed: 20" in answer["error"]["message"]
    (alone,) = server.complete(prompt="a", prompt_logprobs=1)["choices"]
    assert alone["prompt_logprobs"] == [None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'?"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "qqq": 1}, 400, "it takes "),
        ("/v1/completions", {"prompt": ""}, 400, "non-empty"),
        ("/v1/completions", {"prompt": "a" * 2000}, 400, "maximum context length is 1024"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2000}, 400, "max_model_len=1024"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt": [99999]}, 400, "99999"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "out-of-vocab"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "non-negative"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/v1/chat/completions", {"messages": []}, 400, "at least one message"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": []}}, 400, "choice is empty"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json_object": False}}, 400, "json_object is false"),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {"json": "{}", "disable_additional_properties": True}},
            400,
            "disable_additional_properties is not supported",
        ),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -2}, 400, "`prompt_logprobs` must be"),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {"a": 1}}, 400, "`vllm_xargs`"),
        ("/v1/completions", {"prompt": "a", "kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": [1]}, 400, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "routed_experts_prompt_start": 1}, 400, "routed_experts_prompt_start"),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 5}, 400, "thinking_token_budget"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, 400, "'best_of' is not a parameter"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/completions", {"prompt": "a", "seed": 1, "use_beam_search": True}, 400, "seed is not supported with use"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "watermarking": True}, 400, "waterm"),
        ("/v1/responses", {"input": "a", "max_tool_calls": 1}, 400, "max_tool_calls"),
        ("/v1/responses", {"input": "a", "background": True}, 400, "background"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 404, "resp_1"),
        ("/v1/messages", {"model": "tiny", "messages": [], "max_tokens": 1, "topp": 1}, 400, "did you mean 'top_p'?"),
        ("/v1/completions", {"prompt": "a", "priority": REFUSED}, 400, "the toy refuses this"),
    ],
)
def test_refused_at_once(server: Server, path: str, body: Any, status: int, sentence: str, stream: bool) -> None:
    response = server.start(path, body | {"stream": stream})
    answer = json.loads(response.read())
    assert response.status == status == answer["error"]["code"]
    assert sentence in answer["error"]["message"]


def test_more_beams_than_there_are_log_probabilities_for(server: Server) -> None:
    status, answer = server.post("/v1/completions", {"prompt": "a", "n": 11, "use_beam_search": True})
    assert (status, answer["error"]["code"]) == (400, 400)
    assert "max allowed: 20" in answer["error"]["message"]


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
TAGS = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}
ASKED: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON}}}, "json", PERSON),
    ({"response_format": {"type": "structural_tag", **TAGS}}, "structural_tag", {"type": "structural_tag", **TAGS}),
    ({"structured_outputs": {"json": PERSON}}, "json", PERSON),
    (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        "json",
        {**PERSON, "x-guidance": {"whitespace_flexible": False}},
    ),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
]


@pytest.mark.parametrize(("asked", "kind", "spec"), ASKED)
def test_structured_output_is_the_ranks_to_compile(server: Server, asked: dict[str, Any], kind: str, spec: Any) -> None:
    """None of vLLM's own compilers looks at it: they are more libraries, and refuse what llguidance can."""
    body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0} | asked
    assert server.post("/v1/chat/completions", body)[0] == 200
    grammar = server.wait_call("AddCall")["sampling"]["grammar"]
    assert grammar["kind"] == kind
    found = grammar.get("spec", "")
    assert (json.loads(found) if found.startswith(("{", "[")) else found) == spec


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 3}', b'{"prompt": "a", "n": "x"}'])
def test_broken_bodies(server: Server, body: bytes) -> None:
    status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (400, 400)


def test_failure_on_the_way(server: Server) -> None:
    body = {"prompt": "abcdef", "temperature": 0, "priority": FAILS}
    status, answer = server.post("/v1/completions", body)
    assert (status, answer["error"]["message"]) == (503, "the toy has lost this")
    status, answer = server.post("/v1/completions", body | {"temperature": 1, "n": 2})
    assert (status, answer["error"]["message"]) == (503, "the toy has lost this")
    last = events_or_error(server.start("/v1/completions", body | {"stream": True}))
    assert last["error"]["message"] == "the toy has lost this"


def events_or_error(response: http.client.HTTPResponse) -> Any:
    """The last object of a stream, or the response if it is none."""
    if response.status != 200:
        return json.loads(response.read())
    return events(response)[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(server: Server, stream: bool) -> None:
    connection = server.connect()
    body = json.dumps({"prompt": "abcdef", "priority": STALLS, "stream": stream, "n": 2, "temperature": 1})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    added = {server.wait_call("AddCall")["request_id"] for _ in range(2)}
    connection.close()
    aborted: set[str] = set()
    while aborted != added:
        aborted |= set(server.wait_call("AbortCall")["request_ids"])


def test_health_follows_the_engine(server: Server) -> None:
    assert server.get("/health")[0] == 200
    server.tell(ready=False)
    wait_for(lambda: server.get("/health")[0] == 503)
    server.tell(ready=True)
    wait_for(lambda: server.get("/health")[0] == 200)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + DEADLINE_S
    tried = threading.Event()
    while not condition():
        assert time.monotonic() < until
        tried.wait(0.02)


def test_a_request_leaves_a_trace(server: Server) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"prompt": "abcdef", "temperature": 0}
    assert server.post("/v1/completions", body, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})[0] == 200
    while bytes.fromhex(trace) not in (got := server.traces.bodies.get(timeout=DEADLINE_S)):
        pass
    assert b"llm_request" in got
    assert b"gen_ai.latency.time_to_first_token" in got


def test_metrics(server: Server) -> None:
    server.complete()
    metrics = server.get("/metrics")[1].splitlines()
    assert 'vllm:num_requests_running{engine="1",model_name="tiny",rank="1"} 1.0' in metrics
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny",rank="0"} 3.0' in metrics
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny",rank="0"} 0.1' in metrics
    (preemptions,) = (line for line in metrics if line.startswith('vllm:num_preemptions_total{engine="1"'))
    assert float(preemptions.split()[1]) % 7 == 0 < float(preemptions.split()[1])  # 7 with each start of the rank
    starts = float(preemptions.split()[1]) / 7
    for name, count in (("drafts", 5), ("draft_tokens", 20), ("accepted_tokens", 15)):
        (drafts,) = (line for line in metrics if line.startswith(f'vllm:spec_decode_num_{name}_total{{engine="1"'))
        assert float(drafts.split()[1]) == count * starts
    for position, count in enumerate((9, 6)):
        labels = f'engine="1",model_name="tiny",position="{position}",rank="1"'
        assert f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count * starts}" in metrics
    assert any(line.startswith('vllm:generation_tokens_total{engine="0"') for line in metrics)
    assert [line for line in metrics if "engine=" in line and "rank=" not in line] == []
    assert 'rankbus_bus_rejected_frames_total{bus="client",process="frontend/0",reason="invalid"} 2.0' in metrics
    assert 'rankbus_rank_scheduler_prompt_tokens_total{rank="1"} 100.0' in metrics
    assert 'rankbus_frontend_unfinished_requests{frontend="0"} 1.0' in metrics
    assert "rankbus_ready 1.0" in metrics


def text_output(server: Server, **generate: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text and the `Finished` messages of a text request of the client bus."""
    server.tell(generate={"type": "Generate", **generate})
    children = generate.get("params", {}).get("n", 1)
    text, finished = "", []
    while len(finished) < children:
        message = server.wait_call("TextOutput")["message"]
        if "reason" in message:
            finished.append(message)
        else:
            text += message["text"]
    return text, finished


def test_text_requests_of_the_client_bus(server: Server) -> None:
    text, (finished,) = text_output(server, request_id="a", text="abcdef", params={"temperature": 0})
    assert text == "abcdef"
    assert finished["reason"] == "stop"
    assert (finished["prompt_tokens"], finished["output_tokens"]) == (6, 7)
    assert finished["cached_tokens"] == 1
    messages = [{"role": "user", "content": "hello"}]
    _, chat = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    text, _ = text_output(server, request_id="b", messages=messages, params={"temperature": 0})
    assert text == chat["choices"][0]["message"]["content"]
    text, (finished,) = text_output(server, request_id="c", text="abcdef", params={"temperature": 0, "stop": ["d"]})
    assert (text, finished["stop_reason"]) == ("abc", "d")
    _, both = text_output(server, request_id="d", text="x", params={"n": 2, "seed": 1})
    assert {message["index"] for message in both} == {0, 1}


@pytest.mark.parametrize(
    ("generate", "code", "sentence"),
    [
        ({"text": ""}, "invalid", "empty"),
        ({"messages": []}, "invalid", "`messages` is empty"),
        ({"messages": [{"content": "a"}]}, "invalid", "no `role`"),
        ({"text": "a" * 2000}, "invalid", "1024"),
        ({"text": "abc", "params": {"max_tokens": 1023}}, "invalid", "at most 1021 are possible"),
        ({"text": "a", "params": {"temperature": -1}}, "invalid", "temperature"),
        ({"text": "a", "params": {"seed": -1}}, "invalid", "seed"),
        (
            {"text": "a", "params": {"grammar": {"kind": "choice", "spec": "a"}}},
            "invalid",
            "choice must be a JSON list",
        ),
        ({"text": "a", "priority": FAILS}, "unavailable", "the toy has lost this"),
    ],
)
def test_refused_text_requests(server: Server, generate: Any, code: str, sentence: str) -> None:
    server.tell(generate={"type": "Generate", "request_id": "r", **generate})
    refused = server.wait_call("TextRefused")
    assert (refused["request_id"], refused["code"]) == ("r", code)
    assert sentence in refused["message"]


def test_text_requests_have_log_probabilities_of_their_prompts(server: Server) -> None:
    """Each child, before its first token, in lines of the same width whether the token is among the most likely."""
    params = {"n": 2, "seed": 1, "max_tokens": 2, "prompt_logprobs": 2, "logprobs": 1}
    server.tell(generate={"type": "Generate", "request_id": "p", "text": "abcdef", "params": params})
    first: dict[int, list[Any]] = {0: [], 1: []}
    ended = 0
    while ended < 2:
        message = server.wait_call("TextOutput")["message"]
        ended += "reason" in message
        if "text" in message:
            first[message["index"]].append(message)
    a = server.complete(prompt="a", max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    ids = [[token, token, token + 1] for token in range(a + 1, a + 6)]
    values = [[-place, -place, -place - 0.5] for place in range(1, 6)]
    for prompt, drawn, *_ in first.values():
        assert (prompt["token_ids"], prompt["text"], prompt["logprobs"]) == ([], "", [1, ids, values])
        token = drawn["token_ids"][0]
        assert (drawn["logprobs"][0], drawn["logprobs"][1][0]) == (0, [token, token])


def test_aborted_text_request(server: Server) -> None:
    server.tell(generate={"type": "Generate", "request_id": "s", "text": "abc", "priority": STALLS, "params": {"n": 2}})
    for _ in range(2):
        server.wait_call("AddCall")
    server.tell(abort="s")
    aborted = 0
    while aborted < 2:
        message = server.wait_call("TextOutput")["message"]
        if "reason" in message:
            assert message["reason"] == "abort"
            aborted += 1


def test_sigterm_ends_streams_and_the_process(tiny_model: Path, tmp_path: Path) -> None:
    server = Server(tiny_model, tmp_path / "server.log")
    response = server.start("/v1/completions", {"prompt": "abc", "priority": STALLS, "stream": True})
    assert response.readline().startswith(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    rest = response.read().decode()
    assert "the frontend is ending" in rest
    assert server.process.wait(5) == 0
