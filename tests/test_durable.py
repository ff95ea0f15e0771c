"""A file is complete with its new bytes, or as it was."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from fusestep import durable


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"before")
    with durable.replacing(path) as file:
        file.write(b"----after")
        file.seek(0)
        file.write(b"long")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"longafter"
    with pytest.raises(TypeError), durable.replacing(path) as file:
        file.writelines([b"half", None])
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"longafter"]


def test_files_that_belong_together_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    durable.write_together({tmp_path / "a": "ä\r\n", tmp_path / "b": "2"})
    assert (tmp_path / "a").read_bytes() == "ä\r\n".encode()
    with pytest.raises(UnicodeEncodeError):
        durable.write_together({tmp_path / "a": "3", tmp_path / "c": "\udc80"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "a").read_text() == "ä\n"


def test_what_keeps_a_file_from_the_disk_is_told_of_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as single, durable.replacing(tmp_path / "a"):
        pass
    with pytest.raises(OSError, match="No space") as first:
        durable.write_together({tmp_path / "b": "", tmp_path / "c": ""})
    assert [raised.value.filename for raised in (single, first)] == [str(tmp_path / "a"), str(tmp_path / "b")]
    # What the block itself could not read is no trouble of this file.
    with pytest.raises(FileNotFoundError) as other, durable.replacing(tmp_path / "a"):
        (tmp_path / "nowhere").read_bytes()
    assert other.value.filename == str(tmp_path / "nowhere")
    with pytest.raises(ConnectionResetError) as unnamed, durable.replacing(tmp_path / "a"):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    assert unnamed.value.filename is None
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_file_is_known_by_its_name(tmp_path: Path) -> None:
    with durable.replacing(tmp_path / "file"):
        (unfinished,) = tmp_path.iterdir()
        assert durable.is_temporary(unfinished)
    assert not durable.is_temporary(tmp_path / "file")


def test_the_obstacle_to_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert durable.obstacle(tmp_path / "new" / "below") is None
    assert durable.obstacle(tmp_path / "file" / "below") == tmp_path / "file"
    (tmp_path / "to nowhere").symlink_to(tmp_path / "nowhere")
    assert durable.obstacle(tmp_path / "to nowhere" / "below") == tmp_path / "to nowhere"
    monkeypatch.chdir(tmp_path)
    assert durable.obstacle(Path("new")) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "to nowhere"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_that_promises_root_everything_and_keeps_nothing_is_an_obstacle() -> None:
    assert durable.obstacle(Path("/proc/new/below")) == Path("/proc")


def test_a_full_disk_is_no_obstacle_but_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space"):
        durable.obstacle(tmp_path / "new")
