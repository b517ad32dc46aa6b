"""What the text of a compiled program says: what it moves, and what kinds of instructions it has."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]\)")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done", "slice-done", "after-all")
"""Instructions that move nothing, or end what another one began."""


class Instruction(NamedTuple):
    """An instruction of a program's text: its opcode, its result, and the names of its operands."""

    name: str
    opcode: str
    result: str
    operands: list[str]
    line: str


def instructions(hlo: str) -> Iterator[Instruction]:
    """All instructions of a program, those within fused computations and loops too."""
    for line in hlo.splitlines():
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
        if found:
            name, result, opcode, rest = found.groups()
            yield Instruction(name, opcode, result, re.findall(r"%([\w.\-]+)", rest.split("), ")[0]), line)


def memory_traffic(hlo: str) -> int:
    """Bytes that a program moves from and to the device's memory, without its attention kernel.

    What lies in the chip's fast memory (S(1) in the text) is not counted. Of a scatter only what is written counts, of
    a gather what is found, of a loop one turn.
    """
    return _traffic_of(hlo, hlo[hlo.index("\nENTRY") :])


def _traffic_of(hlo: str, computation: str) -> int:
    found = {instruction.name: instruction for instruction in instructions(computation)}
    total = 0
    for instruction in found.values():
        if instruction.opcode == "while":
            body = instruction.line.split("body=")[1].split(",")[0]
            start = hlo.index(f"\n{body} (")
            total += _traffic_of(hlo, hlo[start : hlo.index("\n}", start)])
        else:
            total += _traffic(instruction, found)
    return total


def _traffic(instruction: Instruction, others: Mapping[str, Instruction]) -> int:
    if instruction.opcode in _FREE or 'custom_call_target="ConcatBitcast"' in instruction.line:
        return 0
    if instruction.name.startswith("ragged_paged_attention"):
        return 0
    operands = [_arrays(others[name].result) for name in instruction.operands if name in others]
    if instruction.opcode == "copy-start":
        return _arrays(instruction.result)[0].size
    if instruction.opcode == "slice-start":
        return _arrays(instruction.result)[1].size
    results = _arrays(instruction.result)
    read = [sum(array.size for array in arrays if not array.on_chip) for arrays in operands]
    written = sum(array.size for array in results if not array.on_chip)
    if "scatter" in instruction.name or "dynamic-update-slice" in instruction.name:
        update = sum(sorted(array.size for arrays in operands for array in arrays)[:-1])
        return sum(sorted(read)[:-1]) + update
    if "gather" in instruction.name:
        read = [min(size, sum(array.size for array in results)) for size in read]
    return sum(read) + written


class _Array(NamedTuple):
    size: int
    on_chip: bool


def _arrays(result: str) -> list[_Array]:
    """The arrays in the text of a result's type."""
    return [
        _Array(
            _SIZES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n), bool(_ON_CHIP.search(layout or ""))
        )
        for kind, dims, layout in _SHAPE.findall(result)
    ]


def moved(hlo: str, opcodes: Sequence[str], at_least: int) -> list[str]:
    """Instructions of these kinds whose result has at least so many bytes."""
    return [
        instruction.line.strip()[:200]
        for instruction in instructions(hlo)
        if instruction.opcode in opcodes
        and max((array.size for array in _arrays(instruction.result)), default=0) >= at_least
    ]
