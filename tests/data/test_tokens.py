"""Token files."""

from __future__ import annotations

import array
import resource
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusestep.data import TokenFile, tokens, write_token_file
from fusestep.errors import UserError


def everything(source: TokenFile) -> list[int]:
    length = int(source.describe()["tokens"])
    inputs, targets = source.batch(0, 1, length - 1)
    return [*inputs[0].tolist(), int(targets[0, -1])]


@settings(max_examples=40)
@given(data=st.data(), vocab_size=st.sampled_from([2, 256, 50257, 65536, 65537, 2**31 + 5, 2**32]))
def test_ids_come_back_at_every_vocabulary_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, vocab_size: int
) -> None:
    path = tmp_path_factory.mktemp("tokens") / "a.tokens"
    ids = [*data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=50)), vocab_size - 1]
    write_token_file(path, ids, vocab_size)
    source = TokenFile(path)
    assert source.vocab_size == vocab_size
    assert everything(source) == ids
    assert path.stat().st_size == 32 + len(ids) * (2 if vocab_size <= 65536 else 4)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_token_file(path, [1, 2, 500], 501)
    assert path.read_bytes() == b"fusetoks" + struct.pack("<IIQQ", 1, 2, 501, 3) + struct.pack("<3H", 1, 2, 500)


def test_writing_takes_a_tensor_numbers_and_chunks_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    ids = torch.randint(0, 70000, (3, 5))
    flat = ids.flatten().tolist()
    for same in (ids, ids.t().contiguous().t(), ids.int(), flat, iter(flat), list(ids)):
        write_token_file(path, same, 70000)
        assert everything(TokenFile(path)) == flat
    write_token_file(path, [3, 4, ids[0], 7, ids[1:]], 70000)
    assert everything(TokenFile(path)) == [3, 4, *flat[:5], 7, *flat[5:]]


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_token_file(path, [1, 2, 3], 10)
    before = path.read_bytes()
    for ids in ([4, 5, 10], [4, 5, -1], torch.tensor([4, 5, 10])):
        with pytest.raises(UserError, match=r"id (10|-1) at position 2 is outside the vocabulary of 10"):
            write_token_file(path, ids, 10)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tokens"]


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_token_file(path, [1, 2, 3], 10)

    def ids():
        yield torch.tensor([1, 2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(path, ids(), 10)
    assert everything(TokenFile(path)) == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tokens"]


def test_targets_are_one_token_later_and_samples_depend_on_seed_and_number(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_token_file(path, torch.randint(0, 1000, (500,)), 1000)
    source = TokenFile(path, seed=5)
    inputs, targets = source.batch(0, 40, 17)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(TokenFile(path, seed=5).batch(30, 10, 17)[1], targets[30:])
    assert not torch.equal(TokenFile(path, seed=6).batch(0, 40, 17)[0], inputs)


@pytest.mark.parametrize("width", [2, 4])
def test_an_id_outside_the_vocabulary_is_named_when_the_file_is_opened(tmp_path: Path, width: int) -> None:
    path = tmp_path / "bad.tokens"
    # The largest ids have the sign bit of the type that they are mapped as.
    wrong = (1 << (8 * width)) - 2
    ids = array.array("H" if width == 2 else "I", [5] * 100)
    ids[70] = wrong
    path.write_bytes(b"fusetoks" + struct.pack("<IIQQ", 1, width, 300, 100) + ids.tobytes())
    with pytest.raises(UserError, match=rf"bad\.tokens holds id {wrong} at position 70, outside its vocabulary of 300"):
        TokenFile(path)


def test_an_id_beyond_what_is_checked_at_first_is_named_by_the_batch_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.tokens"
    ids = array.array("H", [5] * 30)
    ids[20] = 300
    path.write_bytes(b"fusetoks" + struct.pack("<IIQQ", 1, 2, 300, 30) + ids.tobytes())
    monkeypatch.setattr(tokens, "CHECKED_AT_OPEN", 20)
    source = TokenFile(path)
    with pytest.raises(UserError, match=r"bad\.tokens holds id 300 at position 20, outside"):
        source.batch(0, 200, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with fusestep's header"),
        (b"PK\x03\x04" + bytes(60), "does not begin with fusestep's header"),
        (b"fusetoks" + struct.pack("<IIQQ", 2, 2, 10, 0), "has version 2 and this fusestep reads up to 1"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 3, 10, 0), "header is damaged"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 0, 0), "header is damaged"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 2**63, 1) + bytes(2), "header is damaged"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 10, 3) + bytes(5), "has 37 bytes where 3 ids .* it is truncated"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 10, 2**62) + bytes(5), "it is truncated"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 10, 1) + bytes(5), "it is truncated or damaged"),
        (b"fusetoks" + struct.pack("<IIQQ", 1, 2, 10, 0), "holds no ids"),
    ],
)
def test_a_foreign_or_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.tokens"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"odd\.tokens .*{message}"):
        TokenFile(path)


def test_a_missing_file_a_folder_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="is not a file; give one"):
            TokenFile(path)
    with pytest.raises(UserError, match=r"the folder .* does not exist"):
        write_token_file(tmp_path / "nowhere" / "a.tokens", [1], 2)
    with pytest.raises(UserError, match="vocab_size is 0"):
        write_token_file(tmp_path / "a.tokens", [], 0)


@pytest.mark.parametrize("raw", ["uint16", "uint32"])
def test_bare_ids_are_read_when_their_type_is_given(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "bare.bin"
    ids = [1, 2, 40000, 4]
    path.write_bytes(array.array("H" if raw == "uint16" else "I", ids).tobytes())
    assert everything(TokenFile(path, raw=raw, vocab_size=40001)) == ids
    with pytest.raises(UserError, match="holds id 40000 at position 2"):
        TokenFile(path, raw=raw, vocab_size=300)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated"):
        TokenFile(path, raw=raw, vocab_size=40001)


@pytest.mark.parametrize("options", [{"raw": "uint16"}, {"vocab_size": 5}, {"raw": "int8", "vocab_size": 5}])
def test_bare_ids_need_type_and_vocabulary_together(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="together with vocab_size"):
        TokenFile(tmp_path / "bare.bin", **options)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's count of resident memory")
def test_a_file_of_ten_gigabytes_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.tokens"
    count = 5 * 10**9
    with path.open("wb") as file:
        file.write(b"fusetoks" + struct.pack("<IIQQ", 1, 2, 100, count))
        file.truncate(32 + 2 * count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = TokenFile(path)
    inputs, _ = source.batch(0, 16, 1024)
    assert inputs.shape == (16, 1024)
    # In KiB; what is checked at first is 32 MiB, in pieces.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize(("length", "works"), [(0, False), (16, False), (17, True), (18, True)])
def test_lengths_about_the_context(tmp_path: Path, length: int, works: bool) -> None:
    path = tmp_path / "short.tokens"
    write_token_file(path, range(length), 1000)
    if works:
        _, targets = TokenFile(path).batch(0, 50, 16)
        assert int(targets.max()) == length - 1, "the last token is never a target"
    else:
        with pytest.raises(UserError, match=r"short\.tokens (has 16 tokens.*at least 17|holds no ids)"):
            TokenFile(path).batch(0, 1, 16)


def test_the_description_notices_changed_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write_token_file(path, [1, 2, 3], 10)
    before = TokenFile(path).describe()
    write_token_file(path, [1, 2, 4], 10)
    assert TokenFile(path).describe() != before
