"""LoRA adapters in a whole engine: over HTTP and the client bus, on two ranks, after a restart, and in a replay."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.journal.reader import find
from bus.messages import ComputedBlocks, ListAdapters, LoadAdapter, Resume, SetPause, UnloadAdapter
from frontend.client import AsyncClient, Client, EngineError
from tests.adapters import ALL_TARGETS, merged, write_adapter
from tests.engine import ROOT, START_S, Engine
from tests.executor.test_llama import generate, prompt_of

DEADLINE_S = 60.0
COUNT = 6

pytestmark = pytest.mark.timeout(300)  # the first test starts what all of them use


class World:
    """The engine, the folders of adapters, and what transformers says to a prompt with each merged."""

    def __init__(self, engine: Engine, model: Path, folders: dict[str, Path], journals: Path) -> None:
        self.engine, self.folders, self.journals = engine, folders, journals
        self._references = {name: merged(model, folder) for name, folder in {"": None, **folders}.items()}

    def expected(self, name: str, prompt: list[int], count: int = COUNT) -> list[int]:
        return generate(self._references[name], prompt, count)

    def client(self) -> Client:
        return Client(self.engine.config.client_endpoint(0), timeout_s=DEADLINE_S)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and body."""
        url = f"http://{self.engine.config.host}:{self.engine.port()}{path}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def served(self) -> dict[str, str]:
        """What /v1/models lists, and where it comes from."""
        return {card["id"]: card["root"] for card in self.post("/v1/models")[1]["data"]}

    def complete(self, model: str, prompt: list[int]) -> tuple[int, Any]:
        """Status, and the tokens if that is 200."""
        asked = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        status, answer = self.post("/v1/completions", model=model, prompt=prompt, **asked)
        return status, answer["choices"][0]["token_ids"] if status == 200 else answer


@pytest.fixture(scope="module")
def world(tiny_model: Path, engine_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("adapters")
    folders = {
        "first": write_adapter(root / "first", tiny_model, 4, seed=1),
        "second": write_adapter(root / "second", tiny_model, 8, ("q_proj", "v_proj"), seed=2, use_rslora=True),
        "third": write_adapter(root / "third", tiny_model, 1, ALL_TARGETS[4:], seed=3, layers=[1]),
        "other": write_adapter(root / "other", tiny_model, 4, seed=4),
    }
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    try:
        engine = Engine(
            tiny_model,
            engine_cache,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_loras=3,
            max_lora_rank=8,
            lora_modules=f"first={folders['first']}",
            journal="on",
            journal_dir=str(root / "journals"),
        )
    finally:
        del os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    with engine:
        engine.start()
        made = World(engine, tiny_model, folders, root / "journals")
        engine.wait_ready()
        wait_for_ranks(made)
        yield made
        engine.check_running()


def wait_for_ranks(world: World) -> None:
    """Until both serve, a frontend being ready as soon as it has one."""
    for rank in (0, 1):
        world.engine.wait_until(lambda rank=rank: serves(world, rank), f"rank {rank} serves", START_S)  # type: ignore[misc]


def serves(world: World, rank: int) -> bool:
    try:
        with world.client() as client:
            return bool(tokens(client, [5], count=1, rank=rank))
    except EngineError:
        return False


def tokens(client: Client, prompt: list[int], count: int = COUNT, **options: Any) -> list[int]:
    asked = {"text_output": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": count, **options}
    return client.complete(prompt, **asked)[0].token_ids


def load(world: World, name: str, folder: str = "", **options: Any) -> str:
    with world.client() as client:
        body = LoadAdapter(name=name, path=str(world.folders[folder or name]), **options)
        identity: str = client.command(body).value
        return identity


def listed(client: Client) -> dict[str, str]:
    """The identities of adapters by name."""
    return {item["name"]: item["identity"] for item in client.command(ListAdapters()).value}


@pytest.fixture(autouse=True)
def only_the_first(world: World) -> Iterator[None]:
    """Each test begins with the adapter that is loaded at start."""
    yield
    if world.engine.healthy():
        with world.client() as client:
            for item in client.command(ListAdapters()).value:
                if item["name"] != "first":
                    assert client.command(UnloadAdapter(name=item["name"])).value is True


def test_http_lists_loads_and_unloads_adapters_as_vllm_does(world: World) -> None:
    prompt = prompt_of(20)
    model = world.engine.config.served_model_name or "tiny-llama"
    assert world.served() == {model: world.served()[model], "first": str(world.folders["first"])}
    assert world.complete("first", prompt) == (200, world.expected("first", prompt))
    assert world.complete("second", prompt)[0] == 404
    second = {"lora_name": "second", "lora_path": str(world.folders["second"])}
    status, answer = world.post("/v1/load_lora_adapter", **second)
    assert (status, answer) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert world.served()["second"] == second["lora_path"]
    for name in ("second", "first"):
        assert world.complete(name, prompt) == (200, world.expected(name, prompt))
    assert world.complete(model, prompt) == (200, world.expected("", prompt))
    chat = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert world.post("/v1/chat/completions", **chat)[1]["model"] == "second"
    status, answer = world.post("/v1/load_lora_adapter", **second)
    assert status == 400
    assert "has already been loaded" in answer["error"]["message"]
    status, answer = world.post("/v1/load_lora_adapter", **second | {"lora_path": "/nowhere"}, load_inplace=True)
    assert status == 400
    assert "/nowhere holds no adapter that can be read" in answer["error"]["message"]
    status, answer = world.post("/v1/load_lora_adapter", **second | {"lora_pth": "x"})
    assert status == 400
    assert "'lora_pth' is not a parameter" in answer["error"]["message"]
    assert world.post("/v1/unload_lora_adapter", lora_name="second")[0] == 200
    assert "second" not in world.served()
    assert world.complete("second", prompt)[0] == 404
    assert world.post("/v1/unload_lora_adapter", lora_name="second")[0] == 404


def test_three_adapters_and_none_run_together_on_both_ranks(world: World) -> None:
    load(world, "second")
    load(world, "third")
    asked = [
        (name, rank, prompt_of(9 + 5 * rank, rank)) for name in ("first", "second", "third", "") for rank in (0, 1)
    ]

    async def ask() -> list[list[int]]:
        client = AsyncClient(world.engine.config.client_endpoint(0), timeout_s=DEADLINE_S)
        async with client:
            options = {"text_output": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": COUNT}
            running = [client.complete(p, adapter=name, rank=rank, **options) for name, rank, p in asked]
            return [done[0].token_ids for done in await asyncio.gather(*running)]

    assert asyncio.run(ask()) == [world.expected(name, prompt) for name, _, prompt in asked]
    with world.client() as client:
        paths = {item["name"]: item["path"] for item in client.command(ListAdapters()).value}
        assert paths == {name: str(world.folders[name]) for name in ("first", "second", "third")}
        with pytest.raises(EngineError, match="there are 3 adapters already, which is max_loras"):
            client.command(LoadAdapter(name="other", path=str(world.folders["other"])))
        with pytest.raises(EngineError, match="adapter 'nobody' is not loaded; loaded are 'first'"):
            tokens(client, [5], adapter="nobody")
        with pytest.raises(EngineError, match="adapter 'nobody' is not loaded"):
            client.complete("text", adapter="nobody")
        text = client.complete("text", adapter="third", max_tokens=2, temperature=0.0, ignore_eos=True)[0]
        assert text.token_ids == world.expected("third", tokenised("text"), 2)
        with client.session(
            prompt_of(10), adapter="second", text_output=False, temperature=0.0, max_tokens=3
        ) as session:
            first = [token for piece in session.first for token in piece.token_ids]
            more = prompt_of(6, seed=9)
            again = [token for piece in session.append(more) for token in piece.token_ids]
    assert again == world.expected("second", [*prompt_of(10), *first[:-1], *more], 3)


def tokenised(text: str) -> list[int]:
    """As the tiny model's tokenizer does it: one token per byte."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) + 3 for character in text]


def test_the_prefix_cache_keeps_adapters_apart(world: World) -> None:
    prompt = prompt_of(49, seed=77)

    def cached(adapter: str) -> tuple[int, list[int]]:
        with world.client() as client:
            asked = {"text_output": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": COUNT, "rank": 1}
            done = client.complete(prompt, adapter=adapter, **asked)[0]
            return done.finished.cached_tokens, done.token_ids

    load(world, "changing", "second")
    assert cached("first") == (0, world.expected("first", prompt))
    assert cached("") == (0, world.expected("", prompt))
    assert cached("changing") == (0, world.expected("second", prompt))
    for name, folder in (("first", "first"), ("", ""), ("changing", "second")):
        assert cached(name) == (48, world.expected(folder, prompt))
    with world.client() as client:
        of_each = [
            client.command(ComputedBlocks(prompt_token_ids=prompt, adapter=name)).value[1] for name in ("first", "")
        ]
        assert of_each == [48, 48]
        with pytest.raises(EngineError, match="is loaded already; with replace another may take its place"):
            client.command(LoadAdapter(name="changing", path=str(world.folders["third"])))
    before = load(world, "changing", "third", replace=True)
    assert cached("changing") == (0, world.expected("third", prompt))
    assert load(world, "changing", "third", replace=True) == before  # the same: nothing changes
    assert cached("changing") == (48, world.expected("third", prompt))


def test_requests_that_run_keep_an_adapter_that_is_unloaded(world: World) -> None:
    load(world, "second")
    prompt = prompt_of(12)
    with world.client() as client:
        client.command(SetPause(mode="keep"))  # or the request might be over before the adapter is unloaded
        asked = {"text_output": False, "temperature": 0.0, "ignore_eos": True, "max_tokens": 60, "adapter": "second"}
        running = client.generate(prompt, **asked)
        with pytest.raises(EngineError, match="requests still have adapter 'second'; it takes no new ones"):
            client.command(UnloadAdapter(name="second"), deadline_s=0.0)
        with pytest.raises(EngineError, match="adapter 'second' is not loaded"):
            tokens(client, prompt, adapter="second")
        client.command(Resume())
        drawn = [token for piece in running for token in piece.token_ids]
        assert drawn == world.expected("second", prompt, 60)
    load(world, "other")
    load(world, "third")  # the slot is free again


def test_adapters_are_there_again_after_the_executor_was_killed(world: World) -> None:
    identity = load(world, "second")
    prompt = prompt_of(30, seed=5)
    with world.client() as client:
        world.engine.restart("executor-0", by=signal.SIGKILL)
        world.engine.wait_until(lambda: "second" in listed(client), "the adapter is there again", START_S)
        wait_for_ranks(world)
        assert listed(client)["second"] == identity
        assert set(listed(client)) == {"first", "second"}
        for name in ("second", "first"):
            assert tokens(client, prompt, adapter=name) == world.expected(name, prompt)


def test_no_step_compiles_and_each_kind_of_process_replays(world: World) -> None:
    """The last test here: it ends the engine."""
    world.engine.stop()
    for process in world.engine._ended:
        assert not [line for line in process.events() if line["event"] == "a program was compiled while serving"]
    first = {}
    for journal in find([str(world.journals)]):
        first.setdefault(journal.process.partition("-")[0], journal.name)
    assert set(first) == {"executor", "frontend", "rank"}
    for role, start in first.items():
        command = [sys.executable, "-m", "frontend.cli", "replay", role, start]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("no difference in ")
