"""How a weight is parted over the mesh, and what is added so that all parts are equal.

An axis is cut into units (a head, a column), which are put in the order in which the devices hold them; a unit may be
held by several devices, and a place without one holds zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from executor.mesh import MODEL


class Run(NamedTuple):
    """`length` units from `start` on, one after the other; zeros if `start` is negative."""

    start: int
    length: int


@dataclass(frozen=True)
class Parting:
    """The `axis` of a parameter that is parted `over` axes of the mesh; `unit` elements of it belong together."""

    axis: int
    unit: int
    runs: tuple[Run, ...]
    over: tuple[str, ...] = (MODEL,)

    @property
    def size(self) -> int:
        """Elements of the axis, on all devices together."""
        return self.unit * sum(run.length for run in self.runs)

    @property
    def tensor_size(self) -> int:
        """Elements of the axis in the file."""
        return self.unit * max(run.start + run.length for run in self.runs if run.start >= 0)

    def along(self, axis: int) -> "Parting":
        """The same for a parameter that has these units on another axis."""
        return replace(self, axis=axis)

    def segments(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What stands at elements `start` to `stop`: (element of the tensor in the file, or -1 for zeros; count)."""
        found: list[tuple[int, int]] = []
        place = 0
        for run in self.runs:
            end = place + run.length * self.unit
            first, last = max(start, place), min(stop, end)
            if first < last:
                source = run.start * self.unit + first - place if run.start >= 0 else -1
                found.append((source, last - first))
            place = end
        return found


def evenly(size: int, devices: int, axis: int, over: tuple[str, ...] = (MODEL,)) -> Parting:
    """`size` elements in equal parts, with zeros at the end where that takes some."""
    extra = -size % devices
    return Parting(axis, 1, (Run(0, size), *([Run(-1, extra)] if extra else [])), over)


class Heads(NamedTuple):
    """Query and KV heads as the devices hold them; each device has the KV heads that its query heads need.

    With fewer KV heads than devices, several devices hold the same one. Heads of zeros make all parts equal.
    """

    queries: Parting
    keys: Parting


def heads(num_heads: int, num_kv_heads: int, head_dim: int, devices: int) -> Heads:
    """Deal `num_heads` query heads, in groups of one KV head each, out to `devices`."""
    shared = num_heads // num_kv_heads
    padded = num_kv_heads
    while padded % devices and devices % padded:
        padded += 1
    copies = max(1, devices // padded)
    width = -(-shared // copies)
    keys: list[int] = []
    queries: list[int] = []
    for head in range(padded):
        for copy in range(copies):
            keys.append(head if head < num_kv_heads else -1)
            mine = range(copy * width, (copy + 1) * width)
            queries += [head * shared + q if head < num_kv_heads and q < shared else -1 for q in mine]
    return Heads(Parting(1, head_dim, _runs(queries)), Parting(1, head_dim, _runs(keys)))


def _runs(units: Sequence[int]) -> tuple[Run, ...]:
    """`units`, each the number of one or -1 for zeros, with those that follow each other together."""
    runs: list[Run] = []
    for unit in units:
        last = runs[-1] if runs else None
        if last and (unit == last.start + last.length if last.start >= 0 else unit < 0):
            runs[-1] = Run(last.start, last.length + 1)
        else:
            runs.append(Run(unit, 1))
    return tuple(runs)
