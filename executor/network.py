"""A model on the mesh: its programs, its weights and its KV cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from executor.attention_cpu import blank_cache
from executor.compute import Adapters
from executor.placement import Places
from executor.programs import bucket
from executor.shards import Array
from executor.step import Int32, MergedStep
from executor.step_programs import StepPrograms


class Output(NamedTuple):
    """What the last layer gave in a step: `ending` for the last token of each sequence, `x` for all tokens.

    `size` is that of the programs that ran.
    """

    ending: Array
    x: Array
    size: int


class Network:
    """Runs the layers of a model over the tokens of steps, whose keys and values it keeps."""

    def __init__(self, steps: StepPrograms) -> None:
        self.steps = steps
        self.outer = steps.outer
        self.kv = jax.tree.map(blank_cache if steps.kernels else zeros, steps.kv)
        self._layers = steps.layers
        self._adapters = jax.tree.map(zeros, steps.adapters)

    def run(self, step: MergedStep, places: Places, history: Array, slots: Int32 | None = None) -> Output:
        """Give the tokens of a step to the device; `history` holds them.

        Where there may be adapters, `slots` [n] are those of the step's sequences, from 1, and 0 where one has none.
        """
        steps, placement = self.steps, self.steps.placement
        if step.num_tokens.max() == 1:
            name, size = "decode", bucket(steps.decode_sizes, places.most)
        else:
            name, size = "mixed", bucket(steps.mixed_sizes, placement.most_tokens(step, places))
        sequences = steps.sequences(name, size)
        batch = placement.pack_batch(step, places, sequences, steps.kv_layout.most_blocks, slots)
        x, shared = steps.programs.run(f"{name} enter", size, self.outer, history, batch)
        for group, layers in enumerate(self._layers):
            program = steps.layers_name(name, group)
            given = (layers, self.kv[group], x, shared, self._adapters[group])
            ending, x, self.kv[group] = steps.programs.run(program, size, *given)
        return Output(ending, x, size)

    def place_adapter(self, slot: int, factors: Adapters) -> None:
        """Put an adapter, as `AdapterLayout.bring` gives it, into a slot: steps that are run from now on find it."""
        begin, steps = 0, self.steps
        for group, held in enumerate(self._adapters):
            one = factors[begin : begin + len(held)]
            begin += len(held)
            self._adapters[group] = steps.programs.run(
                steps.layers_name("adapter", group), 1, held, one, steps.slot(slot)
            )


def zeros(outline: jax.ShapeDtypeStruct) -> Array:
    """An array of zeros on the mesh."""
    return jnp.zeros(outline.shape, outline.dtype, device=outline.sharding)
