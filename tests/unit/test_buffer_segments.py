"""The files that hold payloads: whole, past the page cache if large, and nothing left of what a disk refuses."""

import errno
import fcntl
import os

import pytest

from megatron_sao.buffer.segments import Frame, Record, SegmentCorrupt, Segments


def direct_io_of(directory):
    """O_DIRECT, or 0 if the file system of this directory takes none."""
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT


def framed(payload):
    frame = Frame(len(payload))
    frame.payload[:] = payload
    return Record.of(frame.payload, frame)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.seg")}


def write_around(path, data, offset):
    """To a segment, in pieces that direct I/O would not take."""
    with path.open("r+b") as file:
        return os.pwrite(file.fileno(), data, offset)


@pytest.mark.parametrize("at_once", [1, 5, 21, 22, 1000, 5000, 10**6])
def test_a_kernel_that_takes_any_number_of_bytes_at_a_time_gets_them_all(tmp_path, monkeypatch, at_once):
    written = []

    def pwritev(file, parts, offset):
        written.append(write_around(tmp_path / "00000001.seg", b"".join(parts)[:at_once], offset))
        return written[-1]

    monkeypatch.setattr("megatron_sao.buffer.segments.os.pwritev", pwritev)
    segments = Segments(tmp_path)
    records = [Record.of(b"first"), Record.of(b""), framed(b"large" * 2000), Record.of(memoryview(b"last"))]
    with segments.appending():
        places = [segments.append(record) for record in records]
    assert [segments.read(*place) for place in places] == [b"first", b"", b"large" * 2000, b"last"]
    assert segments.stored_bytes == (tmp_path / "00000001.seg").stat().st_size
    gap = places[2][1] - (16 + len(b"first") + 16)  # up to where a block begins
    assert sum(written) == segments.stored_bytes - gap


def test_a_file_that_is_no_segment_is_left_alone(tmp_path):
    for name in ("copy of 00000001.seg", "x.seg"):
        (tmp_path / name).write_text("not ours")
    segments = Segments(tmp_path)
    with segments.appending():
        assert segments.append(Record.of(b"first")) == (1, 0)
    segments.keep_only(set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy of 00000001.seg", "x.seg"]


@pytest.mark.parametrize("length", [0, 1, 4079, 4080, 4081, 3 * 2**20])
def test_a_framed_record_lies_between_others_in_blocks_of_its_own(tmp_path, length):
    payload = os.urandom(length)
    segments = Segments(tmp_path)
    with segments.appending():
        places = [segments.append(record) for record in (Record.of(b"before"), framed(payload), Record.of(b"after"))]
    assert [segments.read(*place) for place in places] == [b"before", payload, b"after"]
    if direct_io_of(tmp_path):
        assert [offset for _, offset in places] == [0, 4096, 4096 + (16 + length + 4095) // 4096 * 4096]
    content = (tmp_path / "00000001.seg").read_bytes()
    assert segments.stored_bytes == len(content) == places[2][1] + 16 + len(b"after")
    assert not any(content[places[1][1] + 16 + length : places[2][1]])  # no other request's memory in the gap


def test_framed_records_go_past_the_page_cache_and_neighbours_of_a_kind_in_one_write(tmp_path, monkeypatch):
    flags = []

    def pwritev(file, parts, offset):
        flags.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        return original(file, parts, offset)

    original = os.pwritev
    monkeypatch.setattr("megatron_sao.buffer.segments.os.pwritev", pwritev)
    segments = Segments(tmp_path)
    payloads = [b"small", b"large" * 1000, b"larger" * 2000, *(b"small %d" % number for number in range(600))]
    with segments.appending():
        places = [segments.append(framed(p) if p.startswith(b"large") else Record.of(p)) for p in payloads]
    assert flags == [0, direct_io_of(tmp_path), 0, 0]  # Linux takes 1,024 pieces at a time, of which a record has two
    assert [segments.read(*place) for place in places] == payloads


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_a_file_system_without_direct_io_stores_framed_records_all_the_same(tmp_path, monkeypatch, caplog, refuses):
    def refusing(*arguments):
        if refuses == "pwrite" or arguments[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(*arguments)

    original = getattr(os, refuses)
    monkeypatch.setattr(f"megatron_sao.buffer.segments.os.{refuses}", refusing)
    caplog.set_level("INFO")
    segments = Segments(tmp_path, roll_bytes=10)
    files = len(os.listdir("/proc/self/fd"))
    with segments.appending():
        places = [segments.append(framed(payload)) for payload in (b"first" * 10, b"second" * 10)]
    assert [segments.read(*place) for place in places] == [b"first" * 10, b"second" * 10]
    assert places == [(1, 0), (2, 0)] and caplog.text.count("takes no direct I/O") == 1
    assert len(os.listdir("/proc/self/fd")) == files + 1  # that of the second segment


@pytest.mark.parametrize("fails", ["pwritev", "nothing written", "fsync"])
@pytest.mark.parametrize("record", [Record.of(b"lost"), framed(b"lost" * 2000)], ids=["small", "framed"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_what_a_failing_disk_did_not_take_leaves_nothing_behind(tmp_path, monkeypatch, record, fails, before):
    """Neither bytes, nor a file, nor an open one; with what came before it in the same group, over several files."""

    def pwritev(file, parts, offset):
        content = b"".join(parts)
        if b"lost" not in content:
            return write_around(segments._path(segments._active), content, offset)
        if fails == "nothing written":
            return 0
        write_around(segments._path(segments._active), content[:7], offset)
        raise OSError(28, "No space left on device")

    def fsync(file):
        raise OSError(28, "No space left on device")

    segments = Segments(tmp_path, roll_bytes=30)
    kept = []
    for number in range(before):
        with segments.appending():
            kept.append(segments.append(Record.of(b"kept %d" % number)))
    held, files = contents(tmp_path), len(os.listdir("/proc/self/fd"))
    refused = pytest.raises(OSError, match=r"No space left|no more bytes")
    with monkeypatch.context() as patch, refused, segments.appending():
        for _ in range(4):
            segments.append(Record.of(b"of the same group"))
        if fails == "fsync":
            patch.setattr("megatron_sao.buffer.segments.os.fsync", fsync)
        else:
            patch.setattr("megatron_sao.buffer.segments.os.pwritev", pwritev)
        segments.append(record)
    assert contents(tmp_path) == held
    assert segments.stored_bytes == sum(len(content) for content in held.values())
    assert len(os.listdir("/proc/self/fd")) <= files
    with segments.appending():
        kept.append(segments.append(record))
    payloads = [b"kept %d" % number for number in range(before)] + [bytes(record.payload)]
    assert [segments.read(*place) for place in kept] == payloads


def test_a_corrupt_record_is_named_and_never_returned(tmp_path):
    segments = Segments(tmp_path, roll_bytes=10)
    with segments.appending():
        places = [segments.append(Record.of(payload)) for payload in (b"first", b"second", b"third")]
    assert [segment for segment, _ in places] == [1, 2, 3]
    assert [segments.read(*place) for place in places] == [b"first", b"second", b"third"]
    path = tmp_path / "00000002.seg"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    with pytest.raises(SegmentCorrupt, match=r"00000002.seg is corrupt at offset 0"):
        segments.read(*places[1])
    path.write_bytes(b"SAO1" + path.read_bytes()[4:])
    with pytest.raises(SegmentCorrupt, match=r"00000002.seg has format b'SAO1', not b'SAO2'; resume with the version"):
        segments.read(*places[1])
    path.unlink()
    with pytest.raises(SegmentCorrupt, match=r"00000002.seg cannot be read"):
        segments.read(*places[1])
