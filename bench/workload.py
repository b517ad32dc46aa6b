"""What `bench.cpu` has every engine do, and how speed is read from when tokens came."""

import zlib

import numpy as np

PROMPT = 128
OUTPUT = 64
"""Tokens of each request."""


def prompt(name: str, number: int) -> list[int]:
    """A prompt that shares no block with another name's or number's."""
    random = np.random.default_rng([zlib.crc32(name.encode()), number])
    return [int(token) for token in random.integers(100, 40_000, PROMPT)]


def decode_rate(times: list[list[float]]) -> float:
    """Tokens per second while all sequences decode: after every one has its first token, before one has its last."""
    begin = max(stamps[0] for stamps in times)
    end = min(stamps[-1] for stamps in times)
    return sum(begin < stamp <= end for stamps in times for stamp in stamps) / (end - begin)
