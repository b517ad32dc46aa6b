"""What the recorder makes of events, and of what it cannot make anything of."""

import threading
from pathlib import Path
from typing import Any

import pytest

from bus.config import Config, ConfigError, load
from bus.core import Drained, Posted
from bus.journal.blocks import Damaged
from bus.journal.reader import Record
from bus.journal.recorder import code_version, start
from bus.links import Identity
from bus.replay import config_of
from tests.journals import INCARNATION, Nothing, Recording, model

ME = Identity("rank", 0, INCARNATION)


class Echo:
    """A core that answers with what is posted."""

    def handle(self, event: Any) -> list[Any]:
        return [event.value] if isinstance(event, Posted) else []


@pytest.mark.parametrize("value", [threading.Lock(), {1: object()}])
def test_what_cannot_be_encoded_costs_one_record(tmp_path: Path, value: Any) -> None:
    recording = Recording(tmp_path, ME, Echo(), Nothing(), Config())
    for event in (Drained(1.0), Posted(value), Drained(2.0)):
        recording.handle(event)
    found = list(recording.end().records())
    assert [one.number for one in found if isinstance(one, Record)] == [1, 3]
    assert [(one.first, one.last) for one in found if isinstance(one, Damaged)] == [(2, 2)]


def test_the_header_says_what_was_run(tmp_path: Path) -> None:
    recording = Recording(tmp_path, ME, Echo(), Nothing(), Config(max_num_seqs=7), model=model(100))
    recording.handle(Drained(1.0))
    header = recording.end().header()
    assert (header.role, header.index, header.incarnation) == ("rank", 0, INCARNATION)
    assert config_of(header).max_num_seqs == 7
    assert (header.code, header.model) == (code_version("rank"), "fingerprint")


@pytest.mark.parametrize(
    ("setting", "roles"), [("off", ""), ("on", "frontend rank executor"), ("rank,executor", "rank executor")]
)
def test_keeps_journals_of_the_roles_that_are_wanted(tmp_path: Path, setting: str, roles: str) -> None:
    config = load({"journal": setting, "journal_dir": str(tmp_path)}, environ={})
    for role in ("frontend", "rank", "executor"):
        recorder = start(config, Identity(role, 0, 1), Nothing())  # type: ignore[arg-type]
        assert (recorder is not None) == (role in roles.split())
        if recorder is not None:
            recorder.close()


def test_refuses_other_roles() -> None:
    with pytest.raises(ConfigError, match="journal: 'ranks' is not allowed; it must be off, on, or some of frontend"):
        load({"journal": "ranks"}, environ={})


def test_the_code_version_tells_roles_apart() -> None:
    assert code_version("rank") == code_version("rank")
    assert len({code_version("rank"), code_version("executor"), code_version("frontend")}) == 3
