"""The KV blocks of a rank: which are free, who uses the others, and which can be found again by their name.

A free block that has a name is still in the prefix cache until it is given out again. Free blocks are given out from
the front of a list: those without a name go to its front when they become free, those with one to its end, so that
what was used least recently is lost first.
"""

from collections.abc import Iterable, Sequence

from ranks.scheduler import KvChanges

_USED = -1
"""Stands for the neighbours of a block that is not in the list of free ones."""


class BlockPool:
    """Blocks 0 … num_blocks - 1, all free at first. With `caching` false no block ever has a name."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.num_free = num_blocks
        # A ring of the free blocks; the place `num_blocks` stands before the first and after the last.
        self._next = [*range(1, num_blocks + 1), 0]
        self._before = [num_blocks, *range(num_blocks)]
        self._users = [0] * num_blocks
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._blocks_of: dict[bytes, int | list[int]] = {}
        """The block that has a name, or those that do, the one that has had it longest first."""
        self._was_known: dict[bytes, bool] = {}
        """Names that came or went since changes were last taken, and whether they were known then."""
        self._cleared = False

    # Giving out and taking back

    def take(self, count: int) -> list[int]:
        """Give out `count` free blocks, each to one user; their names are lost. The caller knows that there are."""
        following, names, users = self._next, self._name_of, self._users
        end = self.num_blocks
        taken = []
        block = following[end]
        for _ in range(count):
            taken.append(block)
            users[block] = 1
            if names[block] is not None:
                self.forget(block)
            after = following[block]
            following[block] = _USED
            block = after
        following[end] = block
        self._before[block] = end
        self.num_free -= count
        return taken

    def peek(self, count: int) -> list[int]:
        """The blocks that `take` would give out. The caller knows that there are so many free ones."""
        following, block = self._next, self.num_blocks
        blocks = []
        for _ in range(count):
            block = following[block]
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Give `blocks`, found by name, to one more user each."""
        users, before_of, next_of = self._users, self._before, self._next
        for block in blocks:
            if users[block] == 0:
                before, after = before_of[block], next_of[block]
                next_of[before] = after
                before_of[after] = before
                next_of[block] = _USED
                self.num_free -= 1
            users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take the blocks of one user back, given from its first to its last: of these the last is lost first."""
        users, names = self._users, self._name_of
        first: list[int] = []
        last: list[int] = []
        for block in reversed(blocks):
            left = users[block] = users[block] - 1
            if left == 0:
                (last if names[block] is not None else first).append(block)
        if first:
            self._insert(first, self._next[self.num_blocks])
        if last:
            self._insert(last, self.num_blocks)

    def _insert(self, blocks: list[int], after: int) -> None:
        """Put free blocks into the ring, in order, before the place `after`."""
        before_of, next_of = self._before, self._next
        before = before_of[after]
        for block in blocks:
            next_of[before] = block
            before_of[block] = before
            before = block
        next_of[before] = after
        before_of[after] = before
        self.num_free += len(blocks)

    # The prefix cache

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks that have these names, up to the first name that no block has."""
        blocks_of = self._blocks_of
        found = []
        for name in names:
            block = blocks_of.get(name)
            if block is None:
                break
            found.append(block if isinstance(block, int) else block[0])
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody uses."""
        users = self._users
        return [users[block] for block in blocks].count(0)

    def name(self, blocks: Iterable[int], names: Iterable[bytes]) -> None:
        """Let `blocks` in use, none of which has a name, be found by `names`, a name each."""
        name_of, blocks_of, was_known = self._name_of, self._blocks_of, self._was_known
        for block, name in zip(blocks, names, strict=True):
            name_of[block] = name
            others = blocks_of.get(name)
            if others is None:
                was_known.setdefault(name, False)
                blocks_of[name] = block
            elif isinstance(others, int):
                blocks_of[name] = [others, block]
            else:
                others.append(block)

    def forget(self, block: int) -> None:
        """Take a block's name from it, if it has one."""
        name = self._name_of[block]
        if name is None:
            return
        self._name_of[block] = None
        holders = self._blocks_of[name]
        if isinstance(holders, list) and len(holders) > 1:
            holders.remove(block)
        else:
            self._was_known.setdefault(name, True)
            del self._blocks_of[name]

    def clear(self) -> bool:
        """Take all names away; nothing is done, and False the answer, while any block is in use."""
        if self.num_free < self.num_blocks:
            return False
        self._name_of = [None] * self.num_blocks
        self._blocks_of.clear()
        self._was_known.clear()
        self._cleared = True
        return True

    def take_changes(self) -> KvChanges:
        """Names that came and went since the last call, on balance."""
        known = self._blocks_of
        stored = b"".join(name for name, before in self._was_known.items() if not before and name in known)
        removed = b"".join(name for name, before in self._was_known.items() if before and name not in known)
        changes = KvChanges(stored, removed, self._cleared)
        self._was_known.clear()
        self._cleared = False
        return changes

    def names(self) -> bytes:
        """All names there are, one after the other."""
        return b"".join(self._blocks_of)
