"""A whole engine that keeps journals: mixed traffic, a rank that is killed; then every process is replayed."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bus.journal.reader import find
from bus.messages import Grammar, MakeStats, RequestCounts, ResetPrefixCache, TokenCount
from frontend.client import Client, EngineError
from tests import trace_format
from tests.engine import ROOT, START_S, Engine

DEADLINE_S = 60.0
NAME = Grammar(kind="regex", spec="[a-z]{2,6}(-[0-9]{1,3})?")
LOAD = "load.txt"
"""What sending the first part of the journals' requests again has told."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def journals(tiny_model: Path, engine_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the journals of an engine that has run and ended."""
    folder = tmp_path_factory.mktemp("journals")
    with Engine(
        tiny_model,
        engine_cache,
        scheduler="native",
        journal="on",
        journal_dir=str(folder),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=128,
        num_blocks=24,  # so few that requests are preempted
    ) as engine:
        engine.start()
        engine.wait_ready()
        wait_for_ranks(engine)
        run_traffic(engine)
        done = rankbus("replay", "load", str(folder), "--speed", "4", "--endpoint", engine.config.client_endpoint(0))
        (folder / LOAD).write_text(f"{done.returncode} {done.stdout}{done.stderr}")
        engine.restart("rank-1", by=signal.SIGKILL)
        wait_for_ranks(engine)
        run_traffic(engine)
        engine.stop()
    return folder


def wait_for_ranks(engine: Engine) -> None:
    with Client(engine.config.client_endpoint(0), DEADLINE_S) as client:
        for rank in range(engine.config.ranks):
            engine.wait_until(lambda rank=rank: served(client, rank), f"rank {rank} serves", START_S)  # type: ignore[misc]


def served(client: Client, rank: int) -> bool:
    try:
        return bool(client.complete([1, 2, 3], text_output=False, max_tokens=2, rank=rank))
    except EngineError as error:
        if error.code not in ("unavailable", "failed"):
            raise
        return False


def run_traffic(engine: Engine) -> None:
    """Tokens and text, greedy and drawn, log-probabilities, children, sessions, aborts, commands; all at once."""
    endpoint = engine.config.client_endpoint(0)
    failures: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            with Client(endpoint, DEADLINE_S) as client:
                for turn in range(4):
                    prompt = [number, turn] + [7] * (20 * turn + 1)
                    client.complete(prompt, text_output=False, max_tokens=40, ignore_eos=True, n=1 + turn % 2)
                    client.complete("Tell me more.", max_tokens=20, temperature=0.0, logprobs=2)
                    (named,) = client.complete("A name:", max_tokens=30, grammar=NAME)
                    assert re.fullmatch(NAME.spec, named.text)
                    stream = client.generate(prompt[:3], text_output=False, max_tokens=120, ignore_eos=True)
                    client.abort(next(iter(stream)).request_id)
                    assert list(stream)[-1].finished is not None
                with client.session(prompt[:3], text_output=False, max_tokens=12, ignore_eos=True) as session:
                    session.first.end()
                    stopped = session.append([9] * 5)
                    next(iter(stopped))
                    stopped.stop(1)
                    assert session.append([8] * 3).end().output_tokens == 12
                    assert session.append([4] * 3, max_tokens=30, grammar=NAME).end().reason == "stop"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with Client(endpoint, DEADLINE_S) as client:
        for body in (TokenCount(), RequestCounts(), ResetPrefixCache(reset_running_requests=True), MakeStats()):
            client.command(body)
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert not failures, failures[0]


def rankbus(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "frontend.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("role", "starts"), [("frontend", 1), ("rank", 3), ("executor", 1)])
def test_every_start_of_every_process_replays_without_a_difference(journals: Path, role: str, starts: int) -> None:
    found = [journal for journal in find([str(journals)]) if journal.process.startswith(role)]
    assert len(found) == starts
    for journal in found:
        done = rankbus("replay", role, journal.name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("no difference in ")
        assert int(done.stdout.split()[3]) > 100


def test_the_journals_show_what_happened(journals: Path) -> None:
    shown = rankbus("journal", "show", str(journals), "--type", "PeerDown,ResumeRow")
    assert "rank/1" in shown.stdout
    assert "PeerDown command:rank/1" in shown.stdout


def test_the_trace_has_all_steps_and_what_they_waited_for(journals: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = rankbus("trace", str(journals), "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    events = trace_format.check(out)
    names = {event["name"] for event in trace_format.slices(events)}
    phases = {"schedule", "hold", "merge", "dispatch", "device", "split", "update", "outputs", "detokenise"}
    assert phases <= names
    assert any(name.startswith("wait for step ") for name in names)
    steps, whole = (int(word) for word in re.findall(r"(\d+) (?:steps|of them)", done.stdout))
    assert steps > 100
    assert whole > 0.9 * steps  # the others were under way when their rank was killed


def test_a_live_engine_answers_the_recorded_requests_again(journals: Path) -> None:
    code, told = (journals / LOAD).read_text().split(" ", 1)
    assert code == "0", told
    now = re.search(r"now: (\d+) tokens; ended: (.*); not answered: 0", told)
    before = re.search(r"recorded: (\d+) tokens; ended: (.*); not answered: 0", told)
    assert now is not None, told
    assert before is not None, told
    assert int(now[1]) > 0.5 * int(before[1])  # aborts come at other tokens
    (again,), (first,) = (re.findall(r"(\d+) length", one[2]) for one in (now, before))
    assert int(again) >= int(first) > 0  # at first, a rank may have refused some
    assert len(re.findall(r"(?:recorded|now) +│ +\d+\.\d │", told)) == 6
