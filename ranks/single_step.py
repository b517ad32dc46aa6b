"""Single-step mode: steps are shown to a client, which gives back what they are to have drawn (docs/protocol.md)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ranks import results
from ranks.batch import NONE, Batch
from ranks.members import Members
from ranks.outbox import by_id
from ranks.planning import Step
from ranks.rendering import render
from ranks.request import Request
from ranks.scheduler import Refused, StepOutputs


class SingleStep:
    """Renders a scheduler's steps, and reads what a client says of them."""

    def __init__(
        self,
        batch: Batch,
        members: Members,
        steps: Sequence[Step],
        drafts: dict[int, list[int]],
        vocab_size: int,
        unsettle: Callable[[], None],
    ) -> None:
        """`steps` are those that are held, oldest first; the others are as in `Members`."""
        self._batch = batch
        self._members = members
        self._steps = steps
        self._drafts = drafts
        self._vocab_size = vocab_size
        self._unsettle = unsettle
        self._rendered: list[Request] = []
        """The requests of the step rendered last, in its order."""

    def render(self, plan: Step, gone: list[Request]) -> dict[str, Any]:
        """A step that has been made, as `ranks.scheduler.Scheduler.render` gives it; requests in `gone` have ended."""
        before = frozenset(request.number for request in self._rendered)
        self._rendered = [self._batch.request(row) for row in plan.rows.tolist()]
        return render(plan, self._batch, before, gone)

    def read(self, sampled: dict[str, list[int]]) -> results.Drawn:
        """What the oldest step has drawn, `sampled` having the tokens by name of request.

        Raises:
            Refused: it cannot have drawn that.
        """
        step = self._steps[0]
        names = [request.name for request in self._rendered]
        for name in sampled:
            if name not in names:
                raise Refused(f"request {name} is not in the schedule that is held")
        present = self._batch.present(step.rows, step.number).tolist()
        for name, row, samples, here in zip(names, step.rows.tolist(), step.samples.tolist(), present, strict=True):
            most = 1 + len(step.drafts.get(row, ())) if samples else 0
            self._check(name, sampled.get(name, []), most if here else None)
        drawn = [sampled.get(name, []) for name in names]
        lengths = np.array([len(tokens) for tokens in drawn], np.int32)
        table = np.full((len(drawn), max(1, int(lengths.max(initial=0)))), NONE, np.int32)
        for line, tokens in zip(table, drawn, strict=True):
            line[: len(tokens)] = tokens
        return results.Drawn(table, lengths, results.NO_PLACES, results.NO_PLACES)

    def by_id(self, given: StepOutputs) -> dict[str, Any]:
        """What a step gave the requests that were rendered last, by their names."""
        return by_id(given, {(request.frontend, request.handle): request.name for request in self._rendered})

    def _check(self, name: str, tokens: list[int], most: int | None) -> None:
        """Look at the tokens of a request that may have `most` of them; None if they come too late to matter."""
        if most is not None and not min(most, 1) <= len(tokens) <= most:
            raise Refused(
                f"request {name} has {len(tokens)} sampled tokens; in this schedule it must have "
                + ("none: its prompt is not complete" if most == 0 else f"from 1 to {most}")
            )
        if any(not 0 <= token < self._vocab_size for token in tokens):
            raise Refused(f"request {name} has a token that is not in 0 … {self._vocab_size - 1}")

    def bitmask(self) -> tuple[list[str], list[bytes]] | None:
        """See `ranks.scheduler.Scheduler`."""
        step = self._steps[0]
        names, masks = [], []
        present = self._batch.present(step.rows, step.number)
        for request, samples in zip(self._rendered, (step.samples & present).tolist(), strict=True):
            if samples and request.matcher is not None:
                own = request.matcher.masks(step.drafts.get(request.row, []))
                names += [request.name] * len(own)
                masks += own
        return (names, masks) if names else None

    def set_drafts(self, drafts: dict[str, list[int]]) -> list[str]:
        """See `ranks.scheduler.Scheduler`."""
        for name, tokens in drafts.items():
            if any(not 0 <= token < self._vocab_size for token in tokens):
                raise Refused(f"request {name} has a draft that is not in 0 … {self._vocab_size - 1}")
        self._unsettle()
        taken = []
        for name, tokens in drafts.items():
            request = self._members.named(name)
            if request is None or request.row == NONE:
                continue
            self._drafts.pop(request.row, None)
            if request.matcher is not None:
                tokens = request.matcher.allowed_of(tokens)
            if tokens and not self._batch.prefilling[request.row]:
                self._drafts[request.row] = list(tokens)
                taken.append(name)
        return taken
