"""Where the parts of a step lie in the arrays that the device takes: data shards, rows of a shard, padding."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from bus.messages import Sampling
from executor import sampling
from executor.compute import FIELDS, PoolingPiece
from executor.step import Drafts, Flags, Float32, Int32, MergedStep, RowSetup, within

SETUP_TOKENS = 1024
SETUP_ROWS = 16
"""Tokens and rows that one `SetupPiece` holds for each shard."""

_IDLE = Sampling(seed=0, max_tokens=1, temperature=0.0)
"""Parameters of rows that nobody has set up, and of the spare row."""


class Places(NamedTuple):
    """Where entries of something go: the shard of each, its place among the shard's entries, its row in the shard.

    int32 [n] all.
    """

    shards: Int32
    places: Int32
    rows: Int32
    most: int
    """Entries of the shard that has most."""
    at: tuple[Any, Any]
    """Shards and places, as an index that is as simple as can be."""


class SetupPiece(NamedTuple):
    """What one call of the program that sets rows up writes. All with leading [shards]."""

    tokens: Int32
    """[shards, SETUP_TOKENS, 3]: row, position, token."""
    rows: Int32
    """[shards, SETUP_ROWS]: rows that get the parameters after it, see `sampling.RowParams`."""
    floats: Float32
    ints: Int32


class Placement:
    """Ranks are parted into `shards` in order, `ranks_per_shard` each, and each has `max_num_seqs` rows.

    A shard's rows are its ranks' rows one after the other, and a spare one at the end, which padding names.
    """

    def __init__(self, shards: int, ranks_per_shard: int, max_num_seqs: int) -> None:
        self.shards = shards
        self.ranks_per_shard = ranks_per_shard
        self.max_num_seqs = max_num_seqs
        self.rows = ranks_per_shard * max_num_seqs
        """Rows of a shard without the spare one, which is also the spare one's number."""
        self._idle = sampling.pack([(_IDLE, 0)])
        # What was asked for last: steps of the same rows have the same arrays
        self._last_places: tuple[Int32, Places] | None = None
        self._last_draws: tuple[Flags, Places, tuple[Int32, Places]] | None = None
        self._last_picks: tuple[Int32, int, Int32] | None = None

    def place(self, rows: Int32) -> Places:
        """Where entries of global `rows` go, which are in the order of their shards."""
        if self._last_places is not None and self._last_places[0] is rows:
            return self._last_places[1]
        numbers = np.arange(rows.size, dtype=np.int32)
        if self.shards == 1:
            placed = Places(np.zeros_like(rows), numbers, rows, rows.size, (0, slice(rows.size)))
        else:
            shards = rows // np.int32(self.rows)
            counts = np.bincount(shards, minlength=self.shards)
            places = numbers - (np.cumsum(counts) - counts).astype(np.int32)[shards]
            at = shards.astype(np.intp), places.astype(np.intp)
            placed = Places(shards, places, rows % np.int32(self.rows), int(counts.max()), at)
        self._last_places = (rows, placed)
        return placed

    def draws(self, step: MergedStep, places: Places) -> tuple[Int32, Places]:
        """Which entry of a step at `places` each token is drawn for (int32 [m]), and where what is drawn goes."""
        if step.drafts is not None:
            lines = np.where(step.samples, 1 + step.drafts.counts, 0)
            indices = np.repeat(np.arange(step.rows.size, dtype=np.int32), lines)
            return indices, self.place(step.rows[indices])
        last = self._last_draws
        if last is not None and last[0] is step.samples and last[1] is places:
            return last[2]
        indices = np.flatnonzero(step.samples).astype(np.int32)
        draws = indices, places if indices.size == step.rows.size else self.place(step.rows[indices])
        self._last_draws = (step.samples, places, draws)
        return draws

    def most_tokens(self, step: MergedStep, places: Places) -> int:
        """Tokens of the shard that has most."""
        if self.shards == 1:
            return int(np.add.reduce(step.num_tokens))
        return int(np.bincount(places.shards, weights=step.num_tokens).max())

    def pack_batch(
        self, step: MergedStep, places: Places, size: int, most_blocks: int, slots: Int32 | None = None
    ) -> Int32:
        """An `attention.Batch` of `size` sequences per shard, in one array [shards, size, 3 + most_blocks].

        One array, so that it travels to the device at once. With `slots` [n], the sequences' adapters, it has one
        column more.
        """
        packed = np.zeros((self.shards, size, FIELDS + most_blocks + (slots is not None)), np.int32)
        packed[:, :, 0] = self.rows
        shards, lines = places.at
        packed[shards, lines, 0] = places.rows
        packed[shards, lines, 1] = step.positions
        packed[shards, lines, 2] = step.num_tokens
        packed[shards, lines, FIELDS : FIELDS + step.block_tables.shape[1]] = step.block_tables
        if slots is not None:
            packed[shards, lines, -1] = slots
        return packed

    def pack_picks(self, step: MergedStep, places: Places, indices: Int32, drawn: Places, size: int) -> Int32:
        """What is drawn, [shards, size, 3]: whose output it is drawn from, row, position of the drawn token.

        `indices` says for which entries of the step, `drawn` where each goes. The output is that of the sequence in
        that place of the batch, or, with drafts, of the token in that place of what `pack_lines` asks for.
        """
        ends = step.positions + step.num_tokens
        if step.drafts is not None:
            picks = self._picks_of(drawn.places, drawn, size)
            picks[*drawn.at, 2] = ends[indices] - _to_come(step.drafts, indices)
            return picks
        last = self._last_picks
        if last is None or last[0] is not indices or last[1] != size:
            last = self._last_picks = indices, size, self._picks_of(places.places[indices], drawn, size)
        picks = last[2].copy()
        picks[*drawn.at, 2] = ends if drawn is places else ends[indices]
        return picks

    def _picks_of(self, outputs: Int32, drawn: Places, size: int) -> Int32:
        """Picks without positions."""
        picks = self.blank_picks(size)
        picks[*drawn.at, 0] = outputs
        picks[*drawn.at, 1] = drawn.rows
        return picks

    def blank_picks(self, size: int) -> Int32:
        """What `pack_picks` gives where nothing is drawn."""
        picks = np.zeros((self.shards, size, 3), np.int32)
        picks[:, :, 1] = self.rows
        return picks

    def token_ends(self, step: MergedStep, places: Places) -> Int32:
        """For each entry of a step, how many tokens its shard has up to the entry's last one; int32 [n]."""
        ends = np.zeros(step.rows.size, np.int32)
        for shard in range(self.shards):
            mine = places.shards == shard
            ends[mine] = np.cumsum(step.num_tokens[mine], dtype=np.int32)
        return ends

    def pack_lines(self, step: MergedStep, places: Places, indices: Int32, drawn: Places, size: int) -> Int32:
        """Which of a shard's tokens each token is drawn after, [shards, size], for a step with drafts."""
        assert step.drafts is not None
        packed = np.zeros((self.shards, size), np.int32)
        packed[drawn.at] = self.token_ends(step, places)[indices] - 1 - _to_come(step.drafts, indices)
        return packed

    def draft_entries(self, step: MergedStep, drafts: Drafts) -> Int32:
        """Global row, position and token of each of a step's drafts; int32 [drafts, 3]."""
        begins = np.repeat(step.positions + step.num_tokens - drafts.counts, drafts.counts)
        return np.column_stack([np.repeat(step.rows, drafts.counts), begins + drafts.places, drafts.tokens])

    def setup_pieces(self, setups: list[RowSetup], drafts: Int32 | None = None) -> Iterator[SetupPiece]:
        """All that `setups` write, in as few pieces as it takes, at least one, and `drafts` (see `draft_entries`)."""
        groups: list[list[RowSetup]] = [[] for _ in range(self.shards)]
        for setup in setups:
            groups[setup.row // self.rows].append(setup)
        tokens = [self._entries(group) for group in groups]
        if drafts is not None:
            shards = drafts[:, 0] // self.rows
            drafts = np.column_stack([drafts[:, 0] % self.rows, drafts[:, 1:]])
            tokens = [np.concatenate([entries, drafts[shards == shard]]) for shard, entries in enumerate(tokens)]
        calls = max(1, *(-(-len(entries) // SETUP_TOKENS) for entries in tokens))
        calls = max(calls, *(-(-len(group) // SETUP_ROWS) for group in groups))
        whole = self._blank_pieces(calls)
        for shard, (entries, group) in enumerate(zip(tokens, groups, strict=True)):
            whole.tokens[shard, : len(entries)] = entries
            if group:
                whole.rows[shard, : len(group)] = [setup.row % self.rows for setup in group]
                floats, ints = sampling.pack([(setup.sampling, setup.prompt_len) for setup in group])
                whole.floats[shard, : len(group)], whole.ints[shard, : len(group)] = floats, ints
        for call in range(calls):
            some, lines = (slice(call * count, (call + 1) * count) for count in (SETUP_TOKENS, SETUP_ROWS))
            yield SetupPiece(whole.tokens[:, some], whole.rows[:, lines], whole.floats[:, lines], whole.ints[:, lines])

    def pooling_piece(self, lines: int, begun: Int32, told: Places) -> PoolingPiece:
        """One by which the sums of global rows begin (`begun`) and are told (`told`), and nothing is added yet."""
        places = self.place(begun)
        spare = np.full((self.shards, lines), self.rows, np.int32)
        begins, tells = np.zeros((self.shards, self.rows + 1), np.bool_), spare.copy()
        begins[places.shards, places.rows] = True
        tells[told.at] = told.rows
        return PoolingPiece(np.zeros_like(spare), spare, np.zeros(spare.shape, np.float32), begins, tells)

    def blank_params(self) -> tuple[Float32, Int32]:
        """Parameters of all rows before any is set up, the spare one too; see `sampling.RowParams`."""
        floats, ints = self._idle
        return np.tile(floats, (self.shards, self.rows + 1, 1)), np.tile(ints, (self.shards, self.rows + 1, 1))

    def _entries(self, group: list[RowSetup]) -> Int32:
        """Row, position and token of all tokens of some setups; int32 [tokens, 3]."""
        lengths = np.array([setup.tokens.size for setup in group], np.int32)
        offsets = np.array([setup.start for setup in group], np.int32) - (np.cumsum(lengths, dtype=np.int32) - lengths)
        entries = np.empty((int(lengths.sum()), 3), np.int32)
        entries[:, 0] = np.repeat(np.array([setup.row % self.rows for setup in group], np.int32), lengths)
        entries[:, 1] = np.arange(len(entries), dtype=np.int32) + np.repeat(offsets, lengths)
        entries[:, 2] = np.concatenate([_NO_TOKENS, *[setup.tokens for setup in group]])
        return entries

    def _blank_pieces(self, count: int) -> SetupPiece:
        """So many pieces that write nothing but to the spare row, in one."""
        tokens = np.zeros((self.shards, count * SETUP_TOKENS, 3), np.int32)
        tokens[:, :, 0] = self.rows
        rows = np.full((self.shards, count * SETUP_ROWS), self.rows, np.int32)
        floats, ints = self._idle
        return SetupPiece(
            tokens,
            rows,
            np.full((*rows.shape, floats.size), floats, np.float32),
            np.full((*rows.shape, ints.size), ints, np.int32),
        )


_NO_TOKENS: Int32 = np.empty(0, np.int32)


def _to_come(drafts: Drafts, indices: Int32) -> Int32:
    """How many more tokens each of the entries `indices`, of which a run has one for each token drawn, draws."""
    lines = np.bincount(indices, minlength=drafts.counts.size).astype(np.int32)
    left: Int32 = np.repeat(lines, lines) - 1 - within(lines)
    return left
