"""What is said of a process that died, from the kinds of text that such processes leave."""

from __future__ import annotations

import signal

import pytest

from fusestep.ladder.last_words import last_words
from fusestep.ladder.worker import failure

ADVICE = """\
Search for `cudaErrorStreamCaptureInvalidated' in https://docs.nvidia.com/cuda/group__CUDART__TYPES.html for more.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""


def traceback(error: str, file: str = "step.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 3, in f\n    g()\n    ~^^\n{error}\n'


NOT_PERMITTED = f"torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing\n{ADVICE}"
ECHO = f"torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture\n{ADVICE}"
ANOTHER = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            traceback(NOT_PERMITTED),
            "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        ),
        (
            traceback(NOT_PERMITTED) + ANOTHER + traceback(ECHO),
            "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        ),
        # The last of two errors that both tell; an echo of nothing is all there is.
        (traceback("KeyError: 'first'") + ANOTHER + traceback("ValueError: second"), "ValueError: second"),
        (
            traceback(ECHO),
            "torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture",
        ),
        # What a process says after its error, and errors that end no process.
        (
            traceback("KeyError: 'name'")
            + "[W1202 09:04:29.871543210 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not "
            "called before program exit\n/lib/resource_tracker.py:240: UserWarning: resource_tracker: There appear to "
            "be 1 leaked semaphore objects\n  warnings.warn('resource_tracker: There appear to be %d '\n"
            + "Exception ignored in: <function Pool.__del__ at 0x7f>\n"
            + traceback("AttributeError: 'NoneType' object has no attribute 'dumps'"),
            "KeyError: 'name'",
        ),
        (
            "".join(f"[rank0]: {line}\n" for line in traceback("RuntimeError: shapes differ\n").splitlines())
            + "[rank0]:[W1202 09:04:29.8 ProcessGroupNCCL.cpp:1553] Warning: destroy_process_group() was not called\n",
            "RuntimeError: shapes differ",
        ),
        (
            traceback(
                "torch._inductor.exc.InductorError: CalledProcessError: Command '['gcc', 'x.c']' returned 1\n\n"
                "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting "
                'a bug). For even more developer context, set TORCH_LOGS="+dynamo"\n'
            ),
            "torch._inductor.exc.InductorError: CalledProcessError: Command '['gcc', 'x.c']' returned 1",
        ),
        # A message that begins with where it comes from.
        (
            traceback("RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for head.weight"),
            "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for head.weight",
        ),
        # No traceback at all.
        ("no torch here\n", "no torch here"),
        (f"CUDA driver is too old\n{ADVICE}", "CUDA driver is too old"),
        ("  warnings.warn(message)\n", "warnings.warn(message)"),
        ("", ""),
    ],
)
def test_the_line_that_tells_is_found(log: str, words: str) -> None:
    assert last_words(log) == words
    told = failure(1, log)
    assert told["failed"] == f"its process ended with status 1{f': {words}' if words else ''}."
    assert told["log"] == log


def test_a_signal_is_named_with_what_the_process_said_of_it() -> None:
    abort = "terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: an illegal "
    abort += f"memory access was encountered\n{ADVICE}Exception raised from c10_cuda_check (most recent call first):\n"
    abort += "frame #0: c10::Error::Error + 0x80 (0x7f in libc10.so)\n"
    said = failure(-signal.SIGABRT, abort)["failed"]
    assert said == "its process was killed by SIGABRT: CUDA error: an illegal memory access was encountered."
    assert failure(-signal.SIGSEGV, "Fatal Python error: Segmentation fault\n\nThread 0x7f:\n")["failed"] == (
        "its process was killed by SIGSEGV: Fatal Python error: Segmentation fault."
    )
    assert failure(-signal.SIGSEGV, "step 3\n")["failed"] == "its process was killed by SIGSEGV."
