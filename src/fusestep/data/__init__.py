"""Where training sequences come from: rules, text files, token files; each with a part that is held out."""

from fusestep.data.arithmetic import ArithmeticSequences, arithmetic_sequences, strides
from fusestep.data.source import Source
from fusestep.data.text import TextFiles, standard_library
from fusestep.data.tokens import TokenFile, write_token_file
from fusestep.data.vocabulary import Bytes, Numbers
from fusestep.errors import UserError

__all__ = [
    "ArithmeticSequences",
    "Bytes",
    "Numbers",
    "Source",
    "TextFiles",
    "TokenFile",
    "arithmetic_sequences",
    "open_source",
    "standard_library",
    "strides",
    "write_token_file",
]


def open_source(spec: str, *, seed: int = 0) -> Source:
    """The source that a word of the command line names.

    Args:
        spec: "synthetic", "text:PATH", "text:stdlib" (Python's standard library) or "tokens:PATH".
        seed: of the order of its samples.

    Raises: UserError for another word, and whatever the source itself refuses.
    """
    kind, _, path = spec.partition(":")
    match kind:
        case "synthetic" if not path:
            return arithmetic_sequences(seed=seed)
        case "text" if path == "stdlib":
            return standard_library(seed=seed)
        case "text" if path:
            return TextFiles(path, seed=seed)
        case "tokens" if path:
            return TokenFile(path, seed=seed)
    raise UserError(f"data is {spec!r}; choose synthetic, text:PATH, text:stdlib or tokens:PATH.")
