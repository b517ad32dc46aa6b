"""Log-probabilities on their way to a frontend. Those of prompts are told once, whatever has to be computed again."""

from dataclasses import dataclass

from msgspec import structs

from bus.messages import AddRequest, Logprobs, Sampling


@dataclass(slots=True)
class PromptReport:
    """How much a frontend knows of a prompt of `size` tokens: its first `told`, of which the first has no value."""

    size: int
    told: int

    @classmethod
    def for_request(cls, message: AddRequest) -> "PromptReport | None":
        """None if nobody has asked. What comes before output has been told if there is output already."""
        if message.sampling.prompt_logprobs is None:
            return None
        size = message.prompt_token_ids.nbytes // 4
        return cls(size, size if message.output_token_ids.nbytes else 1)

    def rest_of(self, item: Logprobs, owner: int) -> Logprobs | None:
        """Of what the executor has found, what is to be told, under another owner; None if all was."""
        begin, end = self.told - item.prompt_position, item.positions
        if begin >= end:
            return None
        self.told = item.prompt_position + end
        return part_of(item, owner, max(begin, 0), end)


def sampling_for_row(sampling: Sampling, report: PromptReport | None) -> Sampling:
    """A request's parameters for the executor, which need not find again what was told whole."""
    if report is None or report.told < report.size:
        return sampling
    return structs.replace(sampling, prompt_logprobs=None)


def part_of(item: Logprobs, owner: int, begin: int, end: int) -> Logprobs:
    """The positions of an item from `begin` on and before `end`, of those it has, under another owner."""
    end = min(end, item.positions)
    line = item.token_ids.nbytes // max(item.positions, 1)
    return Logprobs(
        owner=owner,
        positions=end - begin,
        token_ids=item.token_ids[begin * line : end * line],
        values=item.values[begin * line : end * line],
        ranks=item.ranks[4 * begin : 4 * end],
        prompt_position=item.prompt_position and item.prompt_position + begin,
    )
