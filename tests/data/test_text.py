"""Text files as bytes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from fusestep.data import TextFiles, standard_library, text
from fusestep.errors import UserError


def everything(source: TextFiles) -> str:
    """All of the text, read through the one window that covers it."""
    length = int(source.describe()["bytes"])
    inputs, targets = source.batch(0, 1, length - 1)
    return source.decode([*inputs[0].tolist(), int(targets[0, -1])])


def test_a_file_is_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("naïve Ω\n", encoding="utf-8")
    source = TextFiles(path)
    assert source.vocab_size == 256
    assert everything(source) == "naïve Ω\n"
    assert source.encode("naïve") == list("naïve".encode())
    assert source.decode([110, 0xFF]) == "n�"


def test_targets_are_one_byte_later_and_samples_depend_on_seed_and_number(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 128)) * 20)
    source = TextFiles(path, seed=5)
    inputs, targets = source.batch(0, 40, 17)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(TextFiles(path, seed=5).batch(30, 10, 17)[0], inputs[30:])
    assert not torch.equal(TextFiles(path, seed=6).batch(0, 40, 17)[0], inputs)


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_and_binary_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in {
        "b.txt": b"second",
        "a/z.txt": b"first",
        "c/x.txt": b"third",
        ".git/config": b"hidden",
        ".hidden": b"hidden",
        "a/picture.png": b"\x89PNG\r\n",
        "zero.txt": b"with\0zero",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="fusestep"):
        source = TextFiles(tmp_path)
    assert everything(source) == "first\nsecond\nthird"
    assert [path.name for path in source.skipped] == ["picture.png", "zero.txt"]
    assert "left out 2 of 6 files that are not UTF-8 text" in caplog.text
    assert str(tmp_path / "zero.txt") in caplog.text


def test_a_link_to_its_own_folder_does_not_loop(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert everything(TextFiles(tmp_path)) == "text"


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "holds no text in 0 text files and 0 others"), ({"a": b"\xff\xfe"}, "no text in 0 text files and 1 others")],
)
def test_a_folder_without_text_is_refused(tmp_path: Path, content: dict[str, bytes], message: str) -> None:
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        TextFiles(tmp_path)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match=r"empty holds no text in 1 text files and 0 others; give a text file"):
        TextFiles(tmp_path / "empty")
    with pytest.raises(UserError, match="nowhere does not exist"):
        TextFiles(tmp_path / "nowhere")


def test_a_read_error_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("text")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"cannot read .*a \(Permission denied\); make it readable"):
        TextFiles(tmp_path)


@pytest.mark.parametrize(("length", "works"), [(0, False), (16, False), (17, True), (18, True)])
def test_lengths_about_the_context(tmp_path: Path, length: int, works: bool) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(bytes(range(65, 65 + length)))
    if works:
        _, targets = TextFiles(path).batch(0, 50, 16)
        assert int(targets.max()) == 65 + length - 1, "the last byte is never a target"
    else:
        with pytest.raises(UserError, match=r"short\.txt (has 16 tokens.*at least 17|holds no text)"):
            TextFiles(path).batch(0, 1, 16)


def test_text_that_does_not_fit_in_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(text.MAXIMUM_BYTES + 1)
    began = time.perf_counter()
    with pytest.raises(UserError, match="write it to a token file"):
        TextFiles(path)
    assert time.perf_counter() - began < 1


def test_the_description_notices_changed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    before = TextFiles(path).describe()
    assert before == TextFiles(path).describe()
    path.write_text("some tExt")
    assert TextFiles(path).describe() != before


def test_the_standard_library_is_real_text_of_bounded_size() -> None:
    source = standard_library()
    assert 2**20 < int(source.describe()["bytes"]) <= text.STANDARD_LIBRARY_BYTES
    assert {path.suffix for path in source.files} == {".py"}
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in source.files)
    assert source.files == sorted(source.files)
    training, held_out = (source.batch(0, 4, 256, held_out=part)[0] for part in (False, True))
    assert not torch.equal(training, held_out)


def test_a_pipe_or_device_is_refused_without_being_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{path} is neither a file nor a folder"):
            TextFiles(path)
