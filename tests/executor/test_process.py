"""The executor's parts put together, with a runner that fails."""

import threading
from pathlib import Path
from typing import Any

import pytest

from bus.config import Config
from bus.links import Identity
from bus.messages import Goodbye
from executor import process
from executor.process import DeviceError, Executor
from executor.step import MergedStep, SampledStep
from tests.process.wire_rank import WireRank

DEADLINE_S = 20.0


class Broken:
    """A runner whose device fails at the first step."""

    num_blocks, max_model_len, vocab_size = 128, 1024, 259
    first_blocks = (1, 65)
    digest = ""

    def __init__(self, *_: Any) -> None:
        pass

    def warm_up(self, progress: Any) -> None:
        pass

    def blocks_of_rank(self, rank: int) -> int:
        return 64

    def dispatch(self, step: MergedStep) -> Any:
        raise MemoryError("the device has no memory left")

    def collect(self, handle: Any) -> SampledStep:
        raise AssertionError("nothing was dispatched")


def test_a_device_that_fails_ends_the_process_by_an_error_and_ranks_are_told(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "Runner", Broken)
    config = Config(model=str(tiny_model), run_dir=str(tmp_path), max_num_seqs=4)
    executor = Executor(config, Identity("executor", 0, 1))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            executor.run()
        except DeviceError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with WireRank(config, 0, incarnation=1) as rank:
            rank.meet()
            rank.schedule({0: 1}, new=[rank.new_row(0, [5])])
            assert rank.receive() == Goodbye(reason="the device failed: MemoryError: the device has no memory left")
        thread.join(DEADLINE_S)
    finally:
        executor.stop("the test is over")
        thread.join(DEADLINE_S)
    (error,) = raised
    assert isinstance(error.__cause__, MemoryError)
