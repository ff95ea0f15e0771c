"""The line of a dead process's stderr that says what it died of, which is seldom the last.

CUDA's errors end in lines of advice, compilers and process groups say what may be set, C++ lists its stack, and of two
errors in a row the second may only be the echo of the first.
"""

from __future__ import annotations

import re

#: Characters of a line that are kept.
_LONGEST = 400

_TRACEBACK = "Traceback (most recent call last):"

#: What stands before a traceback that did not end the process.
_HARMLESS = ("Exception ignored in", "Exception in thread")

#: What a launcher sets before the lines of a rank.
_RANK = re.compile(r"^\[(?:rank|default)\d+\]:\s?")

#: Lines that tell nothing of why a process ended.
_ADVICE = re.compile(
    "|".join(
        (
            r"^\s*$",
            # Of CUDA's errors.
            r"^CUDA kernel errors might be asynchronously reported",
            r"^(Device-side assertions|For debugging consider passing|Compile with `TORCH_USE_CUDA_DSA`)",
            r"^Search for `\w+' in https?://",
            # Of torch's compilers.
            r"^(Set TORCH|You can suppress this exception|\s*(import torch\._dynamo|torch\._dynamo\.config))",
            # Warnings and notes of a logger, of Python and of what tidies up.
            r"^\[[WI]\d{4} \d\d:\d\d:\d\d",
            r"\b\w*Warning: ",
            r"^\s+(warnings\.warn|_?warn)\w*\(",
            r"resource_tracker: ",
            # A C++ stack.
            r"^(Exception raised from .* \(most recent call first\)|frame #\d+: |terminate called )",
            r"^\s*<omitting python frames>",
        )
    )
)

#: Lines of a process that a signal ended which say why.
_ABORTED = re.compile(r"^\s*what\(\):\s*(?P<said>.+)|^(?P<fatal>Fatal Python error: .+|.*Assertion .* failed.*)")

#: Errors that only tell of one before them.
_ECHO = re.compile(r"\bdue to a previous error\b")


def last_words(log: str) -> str:
    """The line that tells, of a process that ended by itself; "" where it said nothing.

    The error of the last traceback; the one before it where that only echoes it; without a traceback the last line
    that is no boilerplate.
    """
    lines = [_RANK.sub("", line).rstrip() for line in log.splitlines()]
    errors = [
        _error_of(lines[place + 1 :])
        for place, line in enumerate(lines)
        if line.startswith(_TRACEBACK) and not (place and lines[place - 1].startswith(_HARMLESS))
    ]
    told = [error for error in errors if error]
    while len(told) > 1 and _ECHO.search(told[-1]):
        told.pop()
    if told:
        return told[-1][:_LONGEST]
    known = [line.strip() for line in lines if line]
    telling = [line for line in known if not _ADVICE.search(line)]
    return (telling or known or [""])[-1][:_LONGEST]


def words_of_abort(log: str) -> str:
    """What a process that a signal ended says of the reason; "" where it says nothing."""
    for line in reversed(log.splitlines()):
        found = _ABORTED.search(_RANK.sub("", line))
        if found is not None:
            return (found["said"] or found["fatal"]).strip()[:_LONGEST]
    return ""


def _error_of(lines: list[str]) -> str:
    """The first line of the message that follows the frames, with the next where it only leads to it."""
    for place, line in enumerate(lines):
        if line and not line[0].isspace():
            following = next((other.strip() for other in lines[place + 1 :] if other), "")
            leads = line.endswith(":") and following and not following.startswith(_TRACEBACK)
            return f"{line} {following}" if leads else line
    return ""
