"""The programs that steps are made of, and the shapes and places of all that they take.

What is here follows from the configuration, the model's outline and the mesh: a machine without the mesh's devices can
compile the programs, and read from them what a step costs.
"""

import hashlib
import math
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bus.config import Config, ConfigError
from bus.model_files import ModelFacts
from executor import compute, hosts
from executor import mesh as meshes
from executor.adapter_layout import AdapterLayout
from executor.attention import Attention, XlaAttention
from executor.attention_cpu import KernelAttention
from executor.attention_tpu import TpuAttention
from executor.compute import FIELDS, Model
from executor.constraints import compose
from executor.kv_layout import KvLayout, memory_fraction
from executor.mesh import BY_LINE, BY_SHARD, DATA, MODEL, WHOLE
from executor.models import parts
from executor.placement import SETUP_TOKENS, Placement
from executor.programs import Programs, sizes_up_to
from executor.sampling import HISTORY_MULTIPLE, Adjustments, RowParams
from executor.step import Int32

SMALLEST_MIXED = 16
"""Tokens of the smallest program for steps in which a sequence has more than one token."""

MOST_LAYERS = {"cpu": 3, "tpu": 4}
"""Layers in one program, at most. On a CPU, with all 30 of the embedded model in one, a start from the cache takes
twice the time, and a call costs 0.1 ms. A TPU's compiler takes seconds for each layer, at each of a dozen sizes; and
while it works on one program it has the next one already."""

UNSTAGED = {"xla_msa_enable": "false"}
"""Keeps a TPU's compiler from placing arrays in the chip's fast memory."""

KV = PartitionSpec(DATA, None, None, MODEL)
"""Of a layer's KV cache [shards, pages, block_size, heads of all the shard's devices, head_dim]."""

Shape: TypeAlias = jax.ShapeDtypeStruct


class StepPrograms:
    """Programs by name and size, and outlines of the arrays that live as long as the runner.

    | outline   | shape                                                                        |
    |-----------|------------------------------------------------------------------------------|
    | `kv`      | for each group of layers that is one program, the KV cache of each            |
    | `history` | int32 [shards, rows + 1, positions], the rows' tokens                         |
    | `params`  | `RowParams`, [shards, rows + 1, …]                                            |
    | `adapters`| for each group of layers, the factors of adapters of each                     |
    | `sums`    | float32 [shards, rows + 1, hidden], see `pooling`                             |
    """

    @staticmethod
    def can_use_kernels(mesh: Mesh, dtype: Any) -> bool:
        """Whether this is what the CPU's kernels are for: one device, and float32."""
        return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" and dtype == jnp.float32

    def __init__(
        self, config: Config, facts: ModelFacts, mesh: Mesh, model: Any, memory_bytes: int, kernels: bool = False
    ) -> None:
        """Declare all programs. `model`, with its parameters or in outline, is used up.

        `memory_bytes` is the memory of all the mesh's devices together of which the KV pool gets its part. `kernels`
        says that the CPU's kernels are loaded, and attention may use them.

        Raises:
            ConfigError: the context is longer than the model's, or the KV pool too small for it.
        """
        self.mesh = mesh
        self.max_model_len = _max_model_len(config, facts)
        self.vocab_size = facts.vocab_size
        self.block_size: int = config.block_size
        shards, devices = mesh.shape[DATA], mesh.shape[MODEL]
        self.platform: str = mesh.devices.flat[0].platform

        dtype = model.norm.scale.get_value().dtype
        self.adapter_layout = AdapterLayout(model, mesh, config.max_loras, config.max_lora_rank, dtype)
        self.model, self.outer, layers = Model.take_apart(model)
        heads = (facts.num_heads, facts.num_kv_heads, facts.head_dim)
        self.kernels = kernels and KernelAttention.takes(*heads, dtype)
        """Whether attention is the CPU's kernel."""
        together = _largest_divisor(facts.num_layers, MOST_LAYERS[self.platform])
        starts = range(0, facts.num_layers, together)
        self.layers = [layers[start : start + together] for start in starts]
        factors = self.adapter_layout.outline()
        self.adapters = [factors[start : start + together] for start in starts]
        self._kinds = [self.model.layers[start : start + together] for start in starts]
        self._first_like = [self._kinds.index(kinds) for kinds in self._kinds]
        self.first_groups = sorted(set(self._first_like))
        """The groups of layers of which each has a program of its own; others share one of these."""

        kv_heads = parts.heads(facts.num_heads, facts.num_kv_heads, facts.head_dim, devices).keys.size
        kv_heads //= facts.head_dim * devices
        pages, pairs, width = self.attention("decode").cache_shape(kv_heads, facts.head_dim)
        page = (self.block_size, pairs * devices, width)
        self.block_bytes = facts.num_layers * pages * math.prod(page) * dtype.itemsize
        """Of a block, all layers, on all devices of its shard."""
        memory_bytes -= self.adapter_layout.num_bytes
        kv_bytes = int(memory_bytes * memory_fraction(config, self.platform))
        self.kv_layout = KvLayout(config, self.max_model_len, self.block_bytes, kv_bytes, shards)
        cache = self._shape((shards, self.kv_layout.shard_blocks * pages, *page), dtype, KV)
        self.kv = [[cache] * together for _ in starts]

        self.placement = Placement(shards, -(-config.ranks // shards), config.max_num_seqs)
        rows = self.placement.rows
        positions = -(-(self.max_model_len + 1) // HISTORY_MULTIPLE) * HISTORY_MULTIPLE
        self.history = self._shape((shards, rows + 1, positions), jnp.int32, BY_SHARD)
        blank = RowParams(*self.placement.blank_params())
        self.params = jax.tree.map(lambda x: self._shape(x.shape, x.dtype, BY_SHARD), blank)
        self.sums = self._shape((shards, rows + 1, facts.hidden_size), jnp.float32, BY_SHARD)

        self.decode_sizes = sizes_up_to(rows)
        most_tokens = self.placement.ranks_per_shard * config.max_num_batched_tokens
        self.lines = max(rows, min(rows * (1 + config.most_drafts), most_tokens))
        """Tokens that a shard can draw in a step."""
        self.draw_sizes = sizes_up_to(-(-self.lines // devices) * devices, devices)
        """Lines of logits: all devices of a shard get as many."""
        self.mixed_sizes = sizes_up_to(max(most_tokens, SMALLEST_MIXED), SMALLEST_MIXED)
        self.programs = Programs(mesh)
        self._declare()

    def attention(self, name: str) -> Attention:
        """How steps of a kind (decode, mixed) attend."""
        if self.platform == "tpu":
            return TpuAttention(self.block_size, one_each=name == "decode")
        return KernelAttention() if self.kernels else XlaAttention(self.block_size, one_each=name == "decode")

    def layers_name(self, name: str, group: int) -> str:
        """The program that runs a group of layers in steps of that name; groups of like layers share one."""
        first = self._first_like[group]
        return f"{name} layers {first}" if first else f"{name} layers"

    def sequences(self, name: str, size: int) -> int:
        """Places for sequences, on each shard, in a batch of the program of that size."""
        return size if name == "decode" else self.placement.rows

    def digest(self, model: str) -> str:
        """The same for processes that can run steps together: of the `model`, the mesh, and all shapes and sizes."""
        held = self.outer, self.kv, self.history, self.params, self.adapters
        arrays = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(held)]
        sizes = self.decode_sizes, self.mixed_sizes, self.draw_sizes, self.lines
        made_of = model, jax.__version__, dict(self.mesh.shape), str(self.mesh.devices), arrays, sizes
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]

    def trace(self) -> None:
        """Trace all programs, with the shapes that steps will give."""
        for name, sizes in (("decode", self.decode_sizes), ("mixed", self.mixed_sizes)):
            for size in sizes:
                ending = self.trace_step(name, size)
        for size in self.draw_sizes:
            self.trace_drawing(size, ending)
        piece = self.placement.pooling_piece(self.lines, _NO_ROWS, self.placement.place(_NO_ROWS))
        _, vectors = self.programs.trace("pool", self.lines, self.outer, ending, self.sums, piece)
        if hosts.are_several():
            self.programs.trace("gather pooled", self.lines, vectors)
        setup = (self.history, self.params, *next(self.placement.setup_pieces([])))
        self.programs.trace("set up", SETUP_TOKENS, *setup)
        if self.takes_adapters:
            for group in self.first_groups:
                one = self.adapter_layout.one_like(self.adapters[group])
                self.programs.trace(self.layers_name("adapter", group), 1, self.adapters[group], one, self.slot(1))

    @property
    def takes_adapters(self) -> bool:
        """Whether there may be adapters."""
        return self.adapter_layout.slots > 0

    def slot(self, number: int) -> Int32:
        """A slot's number, as the program takes it that puts an adapter there."""
        return np.full(self.placement.shards, number, np.int32)

    def trace_step(self, name: str, size: int) -> Any:
        """Trace the programs of a step up to the last layer, and return the shape of what the head takes."""
        trace = self.programs.trace
        columns = FIELDS + self.kv_layout.most_blocks + self.takes_adapters
        batch = _int32(self.placement.shards, self.sequences(name, size), columns)
        x, shared = trace(f"{name} enter", size, self.outer, self.history, batch)
        for group in self.first_groups:
            program = self.layers_name(name, group)
            ending, *_ = trace(program, size, self.layers[group], self.kv[group], x, shared, self.adapters[group])
        if name == "mixed":
            trace("lines", size, x, _int32(self.placement.shards, self.lines))
        return ending

    def trace_drawing(self, size: int, ending: Any) -> None:
        """Trace the programs that draw tokens for `size` sequences of each shard."""
        trace = self.programs.trace
        shards = self.placement.shards
        picks = _int32(shards, size, 3)
        logits = trace("head", size, self.outer, ending, picks)
        trace("adjust", size, logits, self.history, self.params, picks, self.adjustments(size))
        trace("greedy", size, logits, self.history, picks)
        tokens, _ = trace("draw", size, logits, self.history, self.params, picks)
        logprobs = trace("logprobs", size, logits, tokens)
        if hosts.are_several():
            trace("gather tokens", size, tokens)
            trace("gather logprobs", size, logprobs)
            trace("gather logits", size, logits)

    def adjustments(self, size: int) -> Adjustments:
        """What `adjust` takes when nothing is asked for."""
        return next(compose([[]] * self.placement.shards, size, self.vocab_size))

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Shape:
        return Shape(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def _declare(self) -> None:
        """Name all programs that steps can need, in all sizes."""
        add = self.programs.add
        outer = meshes.spec_of(self.outer)
        # It would bring a whole embedding into the fast memory to find some rows in it.
        options = UNSTAGED if self.platform == "tpu" else None
        for name, sizes in (("decode", self.decode_sizes), ("mixed", self.mixed_sizes)):
            attention = self.attention(name)
            for size in sizes:
                enter = partial(self.model.enter, attention, size, self.takes_adapters)
                add(f"{name} enter", size, enter, (outer, BY_SHARD, BY_SHARD), BY_SHARD, options=options)
                for group in self.first_groups:
                    rank = self.adapter_layout.rank
                    run = partial(self.model.run_layers, attention, self.lines, rank, self._kinds[group])
                    factors = meshes.spec_of(self.adapters[group])
                    given = (meshes.spec_of(self.layers[group]), KV, BY_SHARD, BY_SHARD, factors)
                    taken = (BY_SHARD, BY_SHARD, KV)
                    add(self.layers_name(name, group), size, run, given, taken, donate=(1, 2))
                if name == "mixed":
                    add("lines", size, compute.lines, (BY_SHARD, BY_SHARD), BY_SHARD)
        rows = self.placement.rows
        drawing = (BY_LINE, BY_SHARD, BY_SHARD, BY_SHARD)
        for size in self.draw_sizes:
            add("head", size, partial(self.model.head, rows), (outer, BY_SHARD, BY_SHARD), BY_LINE)
            add("adjust", size, compute.adjust, (*drawing, BY_SHARD), BY_LINE)
            add("greedy", size, compute.greedy, (BY_LINE, BY_SHARD, BY_SHARD), BY_SHARD, donate=(1,))
            add("draw", size, compute.draw, drawing, BY_SHARD, donate=(1,))
            add("logprobs", size, compute.logprobs, (BY_LINE, BY_SHARD), BY_LINE)
            if hosts.are_several():
                add("gather tokens", size, compute.gather_shards, (BY_SHARD,), WHOLE)
                add("gather logprobs", size, compute.gather_lines, (BY_LINE,), WHOLE)
                add("gather logits", size, compute.gather_lines, (BY_LINE,), WHOLE)
        add("pool", self.lines, self.model.pool, (outer, BY_SHARD, BY_SHARD, BY_SHARD), BY_SHARD, donate=(2,))
        if hosts.are_several():
            add("gather pooled", self.lines, compute.gather_shards, (BY_SHARD,), WHOLE)
        setup = (BY_SHARD,) * 6
        add("set up", SETUP_TOKENS, compute.set_up, setup, BY_SHARD, donate=(0, 1))
        if self.takes_adapters:
            put = partial(compute.place_adapter, self.adapter_layout.rank)
            for group in self.first_groups:
                factors = meshes.spec_of(self.adapters[group])
                add(self.layers_name("adapter", group), 1, put, (factors, factors, BY_SHARD), factors, donate=(0,))


_NO_ROWS = np.empty(0, np.int32)


def _max_model_len(config: Config, facts: ModelFacts) -> int:
    wanted = config.max_model_len or facts.max_positions
    if wanted > facts.max_positions:
        raise ConfigError(f"max_model_len: {wanted} is not allowed; the model takes at most {facts.max_positions}")
    return wanted


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if number % size == 0)


def _int32(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)
