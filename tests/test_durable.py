"""A file is complete with its new bytes, or as it was."""

from __future__ import annotations

import errno
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
