"""How many KV blocks there are, and where each rank's lie."""

from bus.config import Config, ConfigError

_MEMORY_FRACTION = {"cpu": 0.1, "tpu": 0.9}
"""`Config.kv_memory_fraction` by default. A TPU needs the rest for what a step makes and forgets; a CPU's memory is
shared with all that runs there."""


def memory_fraction(config: Config, platform: str) -> float:
    """The part of the memory to share that the KV pool takes on devices of that platform."""
    return config.kv_memory_fraction or _MEMORY_FRACTION[platform]


class KvLayout:
    """The ranks' blocks in the arrays of the data shards; block 0 of every shard is the spare one (see `attention`).

    `num_blocks` are the blocks of all ranks together, `shard_blocks` those of a shard's array, the spare one too.
    """

    def __init__(
        self, config: Config, max_model_len: int, block_bytes: int, memory_bytes: int, shards: int = 1
    ) -> None:
        """Take what the config says, or else what `memory_bytes` hold at `block_bytes` (all layers) each.

        Raises:
            ConfigError: a rank's blocks do not hold a sequence of `max_model_len`.
        """
        self._ranks = config.ranks
        self.block_size: int = config.block_size
        self.most_blocks = -(-max_model_len // config.block_size)
        """Blocks of the longest sequence."""
        useful = config.ranks * config.max_num_seqs * self.most_blocks
        affordable = memory_bytes // block_bytes
        self.num_blocks: int = config.num_blocks or min(affordable, useful)
        if self.blocks_of_rank(config.ranks - 1) < self.most_blocks:
            raise ConfigError(
                f"num_blocks: {self.num_blocks} KV blocks of {config.block_size} tokens for {config.ranks} ranks do "
                f"not hold a sequence of max_model_len {max_model_len} each; raise num_blocks or kv_memory_fraction, "
                "or lower max_model_len"
            )
        ranks_per_shard = -(-config.ranks // shards)
        offsets = [1] * config.ranks
        for rank in range(1, config.ranks):
            if rank % ranks_per_shard:
                offsets[rank] = offsets[rank - 1] + self.blocks_of_rank(rank - 1)
        self.first_blocks = offsets
        """Where each rank's blocks begin in its shard's array."""
        self.shard_blocks = max(offset + self.blocks_of_rank(rank) for rank, offset in enumerate(offsets))

    def blocks_of_rank(self, rank: int) -> int:
        """KV blocks of a rank: its equal share of `num_blocks`. A remainder goes to the first ranks, one each."""
        share, remainder = divmod(self.num_blocks, self._ranks)
        return share + (rank < remainder)
