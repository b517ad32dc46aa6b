"""The executor process without the model: everything but the jitted calls. ``python -m bench.stub_executor``.

Schedules are merged, rows set up, block tables, positions and padded arrays built as for the device; then each row that
samples gets token 100. When it ends, it writes to the file that BENCH_STEPS names, for each step, when it was done
(monotonic), how many sequences it had, how many ranks took part, and how many requests began with it.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np

from bus import process
from bus.config import Config
from bus.journal import recorder as journal
from bus.links import Identity
from bus.shell import Shell
from executor.checks import Limits
from executor.kv_layout import KvLayout
from executor.pipeline import Pipeline
from executor.placement import Placement
from executor.programs import bucket, sizes_up_to
from executor.replay import Construction, Plain, build
from executor.step import Int32, MergedStep, SampledStep

VOCABULARY = 49_152
TOKEN = 100


class StubRunner:
    """Does on the host what `executor.runner.Runner` does there."""

    def __init__(self, config: Config, layout: KvLayout) -> None:
        self._layout = layout
        self._placement = Placement(1, config.ranks, config.max_num_seqs)
        self._decode_sizes = sizes_up_to(self._placement.rows)
        self._done: list[tuple[float, Int32, int]] = []
        """Per step: when it was done, the ranks of its sequences, and how many rows it set up."""

    def steps(self) -> list[tuple[float, int, int, int]]:
        """Per step: when it was done, its sequences, ranks that took part, and requests that began."""
        return [(when, ranks.size, np.unique(ranks).size, begun) for when, ranks, begun in self._done]

    def dispatch(self, step: MergedStep) -> tuple[MergedStep, Int32]:
        for _ in self._placement.setup_pieces(step.setups) if step.setups else ():
            pass
        places = self._placement.place(step.rows)
        size = bucket(self._decode_sizes, places.most)
        self._placement.pack_batch(step, places, size, self._layout.most_blocks)
        indices, drawn = self._placement.draws(step, places)
        if indices.size:
            self._placement.pack_picks(step, places, indices, drawn, bucket(self._decode_sizes, drawn.most))
        return step, indices

    def collect(self, handle: tuple[MergedStep, Int32]) -> SampledStep:
        step, indices = handle
        tokens = np.full(step.rows.size, -1, np.int32)
        tokens[indices] = TOKEN
        self._done.append((time.monotonic(), step.ranks, len(step.setups)))
        return SampledStep(tokens)


def run(config: Config, me: Identity) -> None:
    """Serve until SIGTERM."""
    assert config.max_model_len is not None
    layout = KvLayout(config, config.max_model_len, block_bytes=1, memory_bytes=1)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=VOCABULARY,
        blocks_of_rank=[layout.blocks_of_rank(rank) for rank in range(config.ranks)],
        first_blocks=layout.first_blocks,
    )
    runner = StubRunner(config, layout)
    pipeline: Pipeline
    construction = Construction("stub", limits)
    recorder = journal.start(config, me, construction, Plain())
    shell = Shell(me, config, build(config, construction), lambda effect: pipeline.submit(effect), recorder)
    pipeline = Pipeline(runner, shell.post, config.async_depth)
    shell.bind("step", config.step_endpoint())
    for frontend in range(config.frontends):
        shell.connect("command", config.command_endpoint(frontend), frontend)
    signal.signal(signal.SIGTERM, lambda *_: shell.stop("the measurement is over"))
    shell.run()
    pipeline.stop(5)
    Path(os.environ["BENCH_STEPS"]).write_text(json.dumps(runner.steps()))


if __name__ == "__main__":
    process.main("executor", run)
