"""A journal's files: what was written is read back, and whatever happens to the bytes, the rest still is."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.counters import Counters
from bus.journal import zstd
from bus.journal.blocks import HEAD, Damaged, frame, unpack_head
from bus.journal.reader import JournalError, find, find_one
from bus.journal.records import ENCODER
from bus.journal.writer import Batch, Files, Limits, Writer
from tests.journals import PLENTY, files, header, read, turn, write

BLOCKS = [range(1, 10), range(10, 11), range(11, 40), range(40, 41), range(41, 42)]
ALL = range(1, 42)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One file with five blocks, the last two of one record each."""
    folder = tmp_path_factory.mktemp("whole")
    (path,) = write(folder, BLOCKS)
    return path.read_bytes()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Where to write a damaged file to."""
    return tmp_path / "rank-0-1-00000.journal"


def ends(data: bytes) -> list[int]:
    """Where the header and each block of a whole file end."""
    found = [0]
    while found[-1] < len(data):
        head = unpack_head(data[found[-1] : found[-1] + HEAD.size])
        assert head is not None
        found.append(found[-1] + HEAD.size + head.stored)
    return found[1:]


def covered(said: list[Damaged]) -> set[int]:
    """The numbers that are named as unreadable."""
    return {number for one in said for number in range(one.first, (max(ALL) if one.last is None else one.last) + 1)}


def test_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path, BLOCKS)
    assert read(tmp_path) == ({number: turn(number) for number in ALL}, [])


def test_a_file_cut_at_any_byte_of_the_last_two_records_is_read_up_to_there(whole: bytes, damaged: Path) -> None:
    sizes = {end: block[-1] for end, block in zip(ends(whole)[1:], BLOCKS, strict=True) if block[-1] >= 39}
    assert list(sizes.values()) == [39, 40, 41]
    for size in range(min(sizes), len(whole) + 1):
        damaged.write_bytes(whole[:size])
        records, said = read(damaged.parent)
        last = max(number for end, number in sizes.items() if end <= size)
        assert records == {number: turn(number) for number in range(1, last + 1)}
        if size in sizes:
            assert said == []
        else:
            assert [(one.first, one.last) for one in said] == [(last + 1, None)]
            assert f"cannot be read: {damaged.name} is cut" in str(said[0])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_file_cut_anywhere_is_read_up_to_there(whole: bytes, damaged: Path, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(whole) - 1))
    damaged.write_bytes(whole[:size])
    records, said = read(damaged.parent)
    assert records == {number: turn(number) for number in range(1, len(records) + 1)}
    assert len(records) in {0, *(block[-1] for block in BLOCKS)}
    assert said == [] or covered(said) == set(ALL) - records.keys()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bits_are_told_by_record_and_cost_no_other_block(
    whole: bytes, damaged: Path, data: st.DataObject
) -> None:
    flipped = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) * 8 - 1), min_size=1, max_size=3, unique=True)):
        flipped[place // 8] ^= 1 << place % 8
    damaged.write_bytes(flipped)
    records, said = read(damaged.parent)
    assert all(turn(number) == value for number, value in records.items())
    assert set(ALL) - records.keys() == covered(said) - {0}
    assert len([block for block in BLOCKS if not records.keys() >= set(block)]) <= 3


def test_flipped_bits_everywhere_are_survived(whole: bytes, damaged: Path) -> None:
    for place in range(0, len(whole) * 8, 23):  # a bit of every third byte
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        damaged.write_bytes(flipped)
        records, said = read(damaged.parent)
        assert all(turn(number) == value for number, value in records.items())
        assert set(ALL) - records.keys() == covered(said) - {0}


def test_one_flipped_bit_names_the_one_record(whole: bytes, damaged: Path) -> None:
    flipped = bytearray(whole)
    flipped[-3] ^= 8
    damaged.write_bytes(flipped)
    records, said = read(damaged.parent)
    assert records.keys() == set(ALL) - {41}
    assert "record 41 cannot be read" in str(said[0])
    assert damaged.name in str(said[0])


def test_missing_records_are_told(tmp_path: Path) -> None:
    write(tmp_path, [range(1, 4), range(9, 12)])
    records, said = read(tmp_path)
    assert list(records) == [1, 2, 3, 9, 10, 11]
    assert [(one.first, one.last) for one in said] == [(4, 8)]


def test_goes_on_to_the_next_file_by_size_and_deletes_the_oldest(tmp_path: Path) -> None:
    paths = write(tmp_path, [[number] for number in range(1, 60)], Limits(file_bytes=1500, file_s=1e9, keep=3))
    assert len(paths) == 3
    assert all(1500 <= path.stat().st_size < 2500 for path in paths[:-1])
    records, said = read(tmp_path)
    assert said == []
    assert list(records) == list(range(min(records), 60))
    assert find_one([str(tmp_path)]).header().number > 0


def test_goes_on_to_the_next_file_by_age(tmp_path: Path) -> None:
    assert len(write(tmp_path, [[1], [2], [3]], Limits(file_bytes=1 << 30, file_s=0.0, keep=10))) == 3
    assert read(tmp_path)[0].keys() == {1, 2, 3}


def test_files_of_other_processes_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "rank-1-5-00000.journal"
    other.write_bytes(b"")
    write(tmp_path, [[number] for number in range(1, 9)], Limits(file_bytes=1, file_s=1e9, keep=2))
    assert other.exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_is_for_nobody_else(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "new", [[1]])
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_leaves_a_whole_file(tmp_path: Path) -> None:
    out = files(tmp_path)
    data = frame(ENCODER.encode(turn(1))) + ENCODER.encode(turn(1))
    out.append(b"R", 1, 1, data)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # the kernel takes 10 bytes of the next block
    try:
        with pytest.raises(OSError, match="too large"):
            out.append(b"R", 2, 1, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size
    out.append(b"R", 3, 1, data)
    out.close()
    records, said = read(tmp_path)
    assert list(records) == [1, 3]
    assert [(one.first, one.last) for one in said] == [(2, 2)]


def test_the_writer_outlives_errors_and_counts_what_is_lost(tmp_path: Path) -> None:
    wrong = [OSError(errno.ENOSPC, "no space left"), RuntimeError("no idea")]

    def compress(raw: bytes) -> bytes:
        if wrong:
            raise wrong.pop()
        return zstd.compressor()(raw)

    counters = Counters()
    writer = Writer(Files(tmp_path, header(), PLENTY, compress), counters)
    for number in range(1, 5):
        data = ENCODER.encode(turn(number))
        writer.put(Batch(number, 1, [frame(data), data], len(data) + 8))
    assert writer.close(10)
    assert counters.snapshot()["journal_lost_records/error"] == 2
    assert counters.snapshot()["journal_records"] == 2
    assert list(read(tmp_path)[0]) == [3, 4]


def test_more_than_may_wait_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.journal.writer.MAX_PENDING_BYTES", 100)
    counters = Counters()
    go_on, writing = os.pipe(), os.pipe()

    def compress(raw: bytes) -> bytes:
        os.write(writing[1], b".")
        os.read(go_on[0], 1)
        return zstd.compressor()(raw)

    writer = Writer(Files(tmp_path, header(), PLENTY, compress), counters)
    data = ENCODER.encode(turn(1))
    batch = Batch(1, 1, [frame(data), data], 101)
    writer.put(batch)
    os.read(writing[0], 1)  # the thread has it and is stuck
    writer.put(batch._replace(first=2))
    assert counters.snapshot() == {"journal_lost_records/slow_disk": 1}
    os.write(go_on[1], b"..")
    assert writer.close(10)
    assert list(read(tmp_path)[0]) == [1]


def test_reads_with_the_systems_library_alone(whole: bytes, damaged: Path) -> None:
    damaged.write_bytes(whole)
    code = (
        "import sys; sys.modules['zstandard'] = None\n"
        "from bus.journal.reader import find_one\n"
        f"print(sum(1 for _ in find_one([{str(damaged)!r}]).records()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "41", done.stderr
    stored = zstd.compressor()(b"abc" * 100)
    system = zstd.of_system()
    assert system(stored, 300) == b"abc" * 100
    with pytest.raises(zstd.ZstdError):
        system(stored[:-1], 300)


def test_finds_journals_by_file_folder_and_name(tmp_path: Path) -> None:
    first, second, *_ = write(tmp_path, [[1], [2], [3]], Limits(file_bytes=1, file_s=1e9, keep=10))
    (tmp_path / "rank-1-7-00000.journal").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no journal")
    name = str(tmp_path / first.name.rsplit("-", 1)[0])
    assert [one.name for one in find([str(tmp_path)])] == [name, str(tmp_path / "rank-1-7")]
    assert len(find_one([name]).files) == 3
    assert find_one([str(first), str(second)]).files == (first, second)
    with pytest.raises(JournalError, match="several journals"):
        find_one([str(tmp_path)])
    with pytest.raises(JournalError, match="no journal of a frontend"):
        find_one([str(tmp_path)], "frontend")
    for nothing in ("nothing", ""):
        with pytest.raises(JournalError, match="is no journal"):
            find([nothing])


def test_a_file_without_header_says_so(tmp_path: Path) -> None:
    (tmp_path / "rank-1-7-00000.journal").write_bytes(os.urandom(999))
    with pytest.raises(JournalError, match="no readable header"):
        find_one([str(tmp_path)]).header()
