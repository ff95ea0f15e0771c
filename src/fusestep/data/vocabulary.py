"""How a person writes and reads token ids: as numbers, or as the bytes of a text."""

from __future__ import annotations

from fusestep.errors import UserError


class Numbers:
    """Ids written as numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Ids of numbers apart by spaces or commas. Raises: UserError for anything else."""
        ids = []
        for word in text.replace(",", " ").split():
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.vocab_size):
                raise UserError(
                    f"{word!r} is not a token id; this data is made of numbers from 0 to {self.vocab_size - 1}, "
                    "such as '3 5 7', not of text."
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        """Numbers apart by spaces."""
        return " ".join(map(str, ids))


class Bytes:
    """Ids that are the bytes of UTF-8 text."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; a byte that Python took from the command line as a surrogate is itself again."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids: list[int]) -> str:
        """Text of UTF-8 bytes; what is not UTF-8 shows as the replacement character."""
        return bytes(ids).decode(errors="replace")
