"""The tensors in a folder's files, read in pieces, and made into weights of 8 bits on the way."""

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import ml_dtypes  # noqa: F401 (with it numpy knows bfloat16, and so safetensors' files of it can be read)
import numpy as np

from executor.step import Float32

PIECE_BYTES = 8 << 20
"""What is read of a tensor at once, about: what is held beside the weights while they are loaded."""


class Tensors:
    """Tensors by name; `place` maps each to the open file that holds it."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        self._place = place
        self._scales: dict[str, Float32] = {}

    @property
    def names(self) -> Set[str]:
        return self._place.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._place[name].get_slice(name).get_shape())

    def pieces(self, name: str, taken: tuple[slice, ...] = ()) -> Iterator[tuple[slice, np.ndarray]]:
        """What `taken` takes of a tensor (axes that it does not name, whole): some of its rows, and what is in them."""
        stored = self._place[name].get_slice(name)
        ranges = [range(size) for size in stored.get_shape()]
        ranges = [whole[by] for whole, by in zip(ranges, taken, strict=False)] + ranges[len(taken) :]
        first, rest = ranges[0], [slice(axis.start, axis.stop) for axis in ranges[1:]]
        at_once = max(1, PIECE_BYTES // (4 * math.prod(map(len, ranges[1:]))))
        for start in range(0, len(first), at_once):
            rows = slice(start, min(start + at_once, len(first)))
            within = slice(first.start + rows.start, first.start + rows.stop)
            yield rows, stored[(within, *rest)]

    def read(self, name: str, taken: tuple[slice, ...], into: np.ndarray) -> None:
        """Write what `taken` takes of a tensor `into` an array, as the array's type; to int8, by `scales`."""
        for rows, values in self.pieces(name, taken):
            if into.dtype == np.int8:
                scales = self.scales(name)[taken[:1]][rows]
                np.rint(values.astype(np.float32) / scales[:, None], out=into[rows], casting="unsafe")
            else:
                into[rows] = values

    def scales(self, name: str) -> Float32:
        """By what the rows of a matrix of 8 bits are multiplied: the largest of each becomes 127 or -127."""
        if name not in self._scales:
            largest = [np.abs(values.astype(np.float32)).max(axis=1) for _, values in self.pieces(name)]
            scales = np.concatenate(largest) / np.float32(127)
            self._scales[name] = np.where(scales > 0, scales, np.float32(1))
        return self._scales[name]
