"""The runner: owner of all that is on the device, and the only one to run programs there."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bus import model_files
from bus.config import Config
from bus.model_files import ModelFacts
from executor import adapter_files, device, hosts, pooling, sampling, weights
from executor import mesh as meshes
from executor.compute import Adapters
from executor.constraints import UNCONSTRAINED, Constraints, Line, compose
from executor.drafts import draft_facts, judge, narrowed
from executor.kernels import library, products
from executor.network import Network, Output, zeros
from executor.placement import SETUP_TOKENS, Places
from executor.pooling import AskedPooling, Pools, without_draws
from executor.programs import bucket
from executor.progress import Progress
from executor.prompts import AskedPrompts, Prompts, collect
from executor.sampling import TOP_LOGPROBS, Adjustments, RowParams, most_likely
from executor.shards import Array
from executor.step import Drafts, Float32, Int32, MergedStep, SampledStep, Words
from executor.step_programs import StepPrograms


class BroughtAdapter(NamedTuple):
    """An adapter that can be put into a slot; for `identity` see `adapter_files.AdapterWeights`."""

    identity: str
    factors: Adapters


class _Drawn(NamedTuple):
    """What the device has been asked to draw."""

    tokens: Array
    """int32 [shards, n]"""
    indices: Int32
    """The entry of the step that each token is drawn for; `places` says where in `tokens`."""
    places: Places
    wanted: dict[int, int]
    """Which of `indices` want log-probabilities, and how many besides the drawn token's; -1 for all."""
    logprobs: sampling.Logprobs | None
    logits: Array | None
    """float32 [shards, n, vocabulary], kept where an entry wants more than `TOP_LOGPROBS`."""
    picks: Int32
    adjusted: Array | None
    """The logits after all adjustments, kept by a runner with `keep_scores`."""


class _Sampled(NamedTuple):
    """What the device has been asked to draw from the output of a network."""

    size: int
    picks: Int32
    raw: Array
    """The logits as the network gave them."""
    adjusted: Array
    all_tokens: Array
    tokens: Array
    """Those for this process to read."""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A step that was dispatched: give it to `Runner.collect`, once, in order."""

    size: int
    done: Array
    drawn: _Drawn | None
    drafts: Drafts | None = None
    drafted: Sequence[tuple[Array, Places]] = ()
    """The tokens of the drafts that are drawn here, in each place, and where they are."""
    prompts: AskedPrompts | None = None
    pooled: AskedPooling | None = None


class Runner:
    """Runs merged steps on a mesh of devices.

    Per row it keeps, for every rank's `max_num_seqs` rows and one spare row per data shard, which padding uses:

    | where  | what                          | bytes                                                    |
    |--------|-------------------------------|----------------------------------------------------------|
    | device | tokens, prompt and output     | 4 × (max_model_len + 1, up to the next multiple of 256)  |
    | device | sampling parameters, numbers  | 6 × 4 (float32) + 4 × 4 (int32: top_k, prompt_len, seed) |
    | host   | `Constraints`, for rows with  | vocabulary / 8 with allowed tokens, else a few hundred   |
    | host   | whether greedy, log-probs     | 1 + 8                                                    |
    | host   | the slot of its adapter       | 4                                                        |
    | device | a sum of hidden states        | 4 × hidden size                                          |
    | host   | a prompt, see `Prompts`       | 4 × its tokens, where their log-probabilities are wanted |

    Positions come with each step, penalty counts and bans are derived from the tokens when they are needed, and the
    key of a draw is (seed, position): there is nothing else to roll back when tokens are dropped.

    A row's tokens are where a step's inputs are read from and where drawn tokens are written to, so a step can be
    dispatched before the one before it is done. JAX queues programs on a CPU, too: of a step of 100 ms a dispatch takes
    1 to 2.
    """

    def __init__(self, config: Config, model_dir: Path, progress: Progress, *, keep_scores: bool = False) -> None:
        """Load the model and allocate everything.

        With `keep_scores` handles hold what `scores` needs: the logits of all that a step draws.

        Raises:
            ModelError: the model cannot be served.
            ConfigError: the KV pool is too small for one sequence of `max_model_len`, or the devices are too few.
        """
        devices = device.set_up(config.cache_path)
        mesh = meshes.make(config, devices)
        dtype = device.dtype_of(config, devices[0])
        facts = model_files.read(model_dir)
        others = draft_facts(config, facts)
        model, kernels = load_model(config, facts, mesh, dtype, progress)
        draft = load_model(config, others, mesh, dtype, progress)[0] if others is not None else None
        # Of a TPU's memory that is what the weights of both models leave.
        memory_bytes = device.memory_for_sharing(mesh.devices.flatten().tolist())
        share = 1.0 if others is None else facts.kv_width / (facts.kv_width + others.kv_width)
        self._network = Network(StepPrograms(config, facts, mesh, model, int(memory_bytes * share), kernels))
        self._steps = self._network.steps
        self.block_size: int = config.block_size
        self.max_model_len = self._steps.max_model_len
        self.vocab_size = facts.vocab_size
        self._fingerprint = facts.fingerprint
        self._keep_scores = keep_scores
        self._spans_processes = hosts.are_several()

        self._placement = self._steps.placement
        self._kv_layout = self._steps.kv_layout
        self._history = zeros(self._steps.history)
        self._params = jax.tree.map(
            lambda values, outline: meshes.put(values, outline.sharding),
            RowParams(*self._placement.blank_params()),
            self._steps.params,
        )
        self._greedy = np.ones(mesh.shape[meshes.DATA] * self._placement.rows, np.bool_)
        self._slots = np.zeros_like(self._greedy, np.int32)
        self._logprobs: dict[int, int] = {}
        self._constraints: dict[int, Constraints] = {}
        self._prompts = Prompts(self._network)
        self._pools = Pools(self._network)
        self._draft: Network | None = None
        """The draft model, in whose KV cache blocks have the same numbers."""
        if others is not None:
            self._fingerprint += others.fingerprint
            sizes = {"max_model_len": self.max_model_len, "num_blocks": self.num_blocks}
            other_config = msgspec.structs.replace(config, **sizes, speculation="off", max_loras=0)
            self._draft = Network(StepPrograms(other_config, others, mesh, draft, memory_bytes, kernels))

    @property
    def _networks(self) -> list[Network]:
        return [network for network in (self._network, self._draft) if network is not None]

    @property
    def num_blocks(self) -> int:
        """KV blocks of all ranks together."""
        return self._kv_layout.num_blocks

    def blocks_of_rank(self, rank: int) -> int:
        """KV blocks of a rank: its equal share of `num_blocks`. A remainder goes to the first ranks, one each."""
        return self._kv_layout.blocks_of_rank(rank)

    @property
    def digest(self) -> str:
        """Stands for the model and the programs that steps are made of; see `StepPrograms.digest`."""
        return self._steps.digest(self._fingerprint)

    @property
    def first_blocks(self) -> list[int]:
        """What steps' block tables have for each rank's block 0; see `merge.Limits`."""
        return self._kv_layout.first_blocks

    def warm_up(self, progress: Progress) -> None:
        """Compile all programs, or take them from the cache of an earlier start. After this no step compiles any."""
        for network in self._networks:
            network.steps.trace()
            network.steps.programs.compile_all(progress)

    def dispatch(self, step: MergedStep) -> Handle:
        """Give a step to the device. Steps run in the order of these calls; several may be on their way."""
        self._set_up(step)
        drafted = self._draw_drafts(self._draft, step) if self._draft is not None and step.drafts is not None else ()
        places = self._placement.place(step.rows)
        if self._draft is not None:
            self._draft.run(step, places, self._history)  # for its KV cache
        slots = self._slots[step.rows] if self._steps.takes_adapters else None
        output = self._network.run(step, places, self._history, slots)
        pooled = drawn = None
        if sums := self._pools.take(step):
            pooled = self._pools.dispatch(sums, step, places, output)
            step = replace(step, samples=without_draws(step, sums))
        if step.drafts is not None:
            drawn = self._draw_tried(step, places, output)
        elif step.samples.any():
            drawn = self._draw(step, places, *self._placement.draws(step, places), output.ending)
        spans = self._prompts.take(step)
        prompts = self._prompts.dispatch(spans, step, places, output) if spans else None
        return Handle(step.rows.size, output.ending, drawn, step.drafts, drafted, prompts, pooled)

    def wait(self, handle: Handle) -> None:
        """Wait until a step is done, in place of `collect` where nobody reads what it drew."""
        jax.block_until_ready([handle.done, *([handle.drawn.tokens] if handle.drawn else [])])

    def collect(self, handle: Handle) -> SampledStep:
        """Wait until a step is done, and fetch what it drew."""
        sampled = self._drawn_of(handle)
        if handle.pooled is not None:
            pooling.collect(handle.pooled, sampled)
        return sampled

    def _drawn_of(self, handle: Handle) -> SampledStep:
        tokens = np.full(handle.size, -1, np.int32)
        prompts = collect(handle.prompts) if handle.prompts is not None else []
        if handle.drawn is None:
            handle.done.block_until_ready()
            return SampledStep(tokens, prompt_logprobs=prompts)
        drawn = handle.drawn
        of_lines = np.asarray(drawn.tokens)[drawn.places.shards, drawn.places.places]
        if handle.drafts is not None:
            judged = judge(handle.size, _known(handle.drafts, handle.drafted), drawn.indices, of_lines)
            logprobs = _by_entry(_read_logprobs(drawn), drawn, judged.lines)
            return SampledStep(judged.tokens, logprobs, judged.counts, prompts)
        tokens[drawn.indices] = of_lines
        return SampledStep(tokens, _by_entry(_read_logprobs(drawn), drawn), prompt_logprobs=prompts)

    def scores(self, handle: Handle, index: int, place: int = 0) -> Float32:
        """What a token was the largest of, the one at `place` of those of the entry `index` of a step.

        float32 [vocabulary], top-k and the like aside. That is its logits after all adjustments, or if it is drawn,
        these by the temperature, plus the noise. To be called before a later step sets the row up anew, on a runner
        with `keep_scores`.
        """
        drawn = handle.drawn
        assert drawn is not None
        assert drawn.adjusted is not None
        place = int(np.flatnonzero(drawn.indices == index)[place])
        shard, line = int(drawn.places.shards[place]), int(drawn.places.places[place])
        row, end = (int(value) for value in drawn.picks[shard, line, 1:])
        logits = drawn.adjusted[shard, line]
        temperature = float(self._params.floats[shard, row, 0])
        if temperature < sampling.GREEDY_BELOW:
            return np.asarray(logits)
        ints = self._params.ints[shard, row]
        noise = sampling.gumbel(self.vocab_size, ints[2:3], ints[3:4], jnp.array([end], jnp.int32))[0]
        return np.asarray(logits / temperature + noise)

    # Adapters

    def read_adapter(self, name: str, path: str) -> BroughtAdapter:
        """Read the adapter in the folder `path`, and bring it to the devices; steps may be dispatched meanwhile.

        Raises:
            AdapterError: it cannot be used.
        """
        layout = self._steps.adapter_layout
        weights = adapter_files.read(Path(path).expanduser(), name, layout.shapes, layout.rank)
        return BroughtAdapter(weights.identity, layout.bring(weights))

    def place_adapter(self, slot: int, adapter: BroughtAdapter) -> None:
        """Put an adapter into a slot, from 1: steps that are dispatched from now on find it there."""
        self._network.place_adapter(slot, adapter.factors)

    # A step

    def _set_up(self, step: MergedStep) -> None:
        """Write what rows begin with, and the drafts, which stand where they would if they were right."""
        for setup in step.setups:
            asked = setup.sampling
            self._slots[setup.row] = setup.adapter
            self._greedy[setup.row] = asked.temperature < sampling.GREEDY_BELOW
            _keep(self._logprobs, setup.row, asked.logprobs)
            _keep(self._constraints, setup.row, Constraints.of(asked, setup.prompt_len, self.vocab_size))
            self._prompts.set_up(setup)
            self._pools.set_up(setup)
        tried = step.drafts if step.drafts is not None and step.drafts.tokens.size else None
        drafts = None if tried is None else self._placement.draft_entries(step, tried)
        for piece in self._placement.setup_pieces(step.setups, drafts) if step.setups or tried is not None else ():
            arguments = (self._history, self._params, *piece)
            self._history, self._params = self._steps.programs.run("set up", SETUP_TOKENS, *arguments)

    def _draw_drafts(self, draft: Network, step: MergedStep) -> list[tuple[Array, Places]]:
        """Have the draft model draw a step's drafts, one after the other, for each is what the next is drawn from."""
        drafted = []
        for one in narrowed(step):
            places = self._placement.place(one.rows)
            output = draft.run(one, places, self._history)
            drawn = self._sample(draft, one, places, *self._placement.draws(one, places), output.ending)
            drafted.append((drawn.tokens, places))
        return drafted

    def _draw_tried(self, step: MergedStep, places: Places, output: Output) -> _Drawn:
        """Draw for the sequences of a step with drafts."""
        indices, drawn = self._placement.draws(step, places)
        lines = self._placement.pack_lines(step, places, indices, drawn, self._steps.lines)
        ending = self._steps.programs.run("lines", output.size, output.x, lines)
        return self._draw(step, places, indices, drawn, ending)

    def _draw(self, step: MergedStep, places: Places, indices: Int32, drawn: Places, ending: Array) -> _Drawn:
        """Draw the tokens of the entries `indices`, which go to `drawn`, `ending` being what they are drawn from."""
        found = self._sample(self._network, step, places, indices, drawn, ending)
        run = self._steps.programs.run
        wanted = (
            {i: self._logprobs[row] for i, row in enumerate(step.rows[indices].tolist()) if row in self._logprobs}
            if self._logprobs
            else {}
        )
        logprobs = run("logprobs", found.size, found.raw, found.all_tokens) if wanted else None
        kept = found.raw if any(not 0 <= count <= TOP_LOGPROBS for count in wanted.values()) else None
        if self._spans_processes:
            logprobs = None if logprobs is None else run("gather logprobs", found.size, logprobs)
            kept = None if kept is None else run("gather logits", found.size, kept)
        adjusted = found.adjusted if self._keep_scores else None
        return _Drawn(found.tokens, indices, drawn, wanted, logprobs, kept, found.picks, adjusted)

    def _sample(
        self, network: Network, step: MergedStep, places: Places, indices: Int32, drawn: Places, ending: Array
    ) -> _Sampled:
        """Draw as `_draw`, by one of the networks."""
        run, rows = network.steps.programs.run, step.rows[indices]
        size = bucket(network.steps.draw_sizes, drawn.most)
        picks = self._placement.pack_picks(step, places, indices, drawn, size)
        logits = raw = run("head", size, network.outer, ending, picks)
        for adjustments in self._adjustments(step, picks, indices, drawn, size):
            logits = run("adjust", size, logits, self._history, self._params, picks, adjustments)
        if self._greedy[rows].all():
            tokens, self._history = run("greedy", size, logits, self._history, picks)
        else:
            tokens, self._history = run("draw", size, logits, self._history, self._params, picks)
        told = run("gather tokens", size, tokens) if self._spans_processes else tokens
        return _Sampled(size, picks, raw, logits, tokens, told)

    def _adjustments(
        self, step: MergedStep, picks: Int32, indices: Int32, drawn: Places, size: int
    ) -> Iterable[Adjustments]:
        """What the entries of a step that draw ask for, one for each call of the program."""
        rows = step.rows[indices].tolist()
        masks: dict[int, list[Words]] = {}
        for index, mask in zip(step.masks.at.tolist(), step.masks.words, strict=True):
            masks.setdefault(index, []).append(mask)
        if not masks and self._constraints.keys().isdisjoint(rows):
            return ()
        asking: list[list[Line]] = [[] for _ in range(self._placement.shards)]
        where = zip(drawn.shards.tolist(), drawn.places.tolist(), strict=True)
        for row, index, (shard, line) in zip(rows, indices.tolist(), where, strict=True):
            constraints = self._constraints.get(row)
            mask = masks[index].pop(0) if index in masks else None
            if constraints is not None or mask is not None:
                end = int(picks[shard, line, 2])
                asking[shard].append(Line(line, end, constraints or UNCONSTRAINED, mask))
        return compose(asking, size, self.vocab_size)


def _known(drafts: Drafts, drafted: Sequence[tuple[Array, Places]]) -> Drafts:
    """Drafts with their tokens, of which those that were drawn here are still on the device."""
    if not drafted:
        return drafts
    tokens = np.empty(int(drafts.counts.sum()), np.int32)
    for place, (drawn, places) in enumerate(drafted):
        # What could not be drawn stands on the device as token 0
        tokens[drafts.places == place] = np.maximum(np.asarray(drawn)[places.shards, places.places], 0)
    return Drafts(drafts.counts, tokens)


def load_model(
    config: Config, facts: ModelFacts, mesh: Mesh, dtype: Any, progress: Progress
) -> tuple[nnx.Module, bool]:
    """The model with its weights as steps take them, and whether the CPU's kernels may be used with it."""
    kernels = StepPrograms.can_use_kernels(mesh, dtype) and library.load(config.cache_path)
    outline = weights.outline(facts, dtype, mesh, config.quantization == "int8")
    return weights.load(facts, outline, progress, products.Packer().pack if kernels else None), kernels


def _read_logprobs(drawn: _Drawn) -> Iterator[tuple[int, tuple[Int32, Float32, int]]]:
    """From the device: by place in `drawn.indices`, what `SampledStep.logprobs` holds for a token."""
    if drawn.logprobs is None:
        return
    found = sampling.Logprobs(*map(np.asarray, drawn.logprobs))
    tokens = np.asarray(drawn.tokens)
    for place, count in drawn.wanted.items():
        at = (int(drawn.places.shards[place]), int(drawn.places.places[place]))
        if tokens[at] < 0:
            continue
        ids, values = found.tokens[at], found.values[at]
        if drawn.logits is not None and not 0 <= count <= TOP_LOGPROBS:
            (ids,), (values,) = most_likely(np.asarray(drawn.logits)[at][None], found.norm[at][None])
        kept = ids.size if count < 0 else count
        yield (
            place,
            (
                np.concatenate([tokens[at][None], ids[:kept]]),
                np.concatenate([found.sampled[at][None], values[:kept]]),
                int(found.rank[at]),
            ),
        )


def _by_entry(
    logprobs: Iterable[tuple[int, tuple[Int32, Float32, int]]], drawn: _Drawn, lines: Int32 | None = None
) -> dict[int, list[tuple[Int32, Float32, int]]]:
    """What `SampledStep.logprobs` holds; of the places in `drawn.indices` only those in `lines`, where given."""
    stays = None if lines is None else frozenset(lines.tolist())
    found: dict[int, list[tuple[Int32, Float32, int]]] = {}
    for place, values in logprobs:
        if stays is None or place in stays:
            found.setdefault(int(drawn.indices[place]), []).append(values)
    return found


def _keep(where: dict[int, Any], row: int, value: Any) -> None:
    """Hold `value` for a row, or nothing if it is None."""
    if value is None:
        where.pop(row, None)
    else:
        where[row] = value
