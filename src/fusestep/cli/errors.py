"""What the command line says, and with which exit status it ends, when something stops it.

    0    done
    1    the command's own answer is no (`fusestep doctor --require`)
    2    something that a person can mend: one sentence on stderr
    130  interrupted; 143 where a command ends at SIGTERM by itself, having kept what it had, 129 at SIGHUP
    141  the reader of a pipe went away; said to nobody, as every program that SIGPIPE ends

Any other exception is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from fusestep import memory
from fusestep.durable import FULL, mend
from fusestep.errors import UserError

#: The packages that only an extra brings, and which extra that is.
EXTRA_OF_PACKAGE = {
    "typer": "cli",
    "rich": "cli",
    "safetensors": "cli",
    "psutil": "cli",
    "jinja2": "report",
    "matplotlib": "report",
}

#: What is wrong with a path that a person gave, whoever met it first.
TROUBLE_WITH_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)

MENDABLE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def exit_status(who: str, program: Callable[[], None]) -> int:
    """Run `program` and return the exit status; say on stderr, as `who`, what a person has to mend."""
    try:
        program()
        # Here, and not in the interpreter's last breath, so that a closed pipe is found while it can be kept quiet.
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{who}: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more as it leaves; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except SystemExit as leaving:
        # Rich meets a closed pipe itself, gives Python somewhere to write, and leaves with 1.
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        return BROKEN_PIPE
    except Exception as error:
        sentence = mendable(error)
        if sentence is None:
            raise
        print(f"{who}: {sentence}", file=sys.stderr)  # noqa: T201
        return MENDABLE
    return 0


Handler = Callable[[int, FrameType | None], object]


def at_interrupt(handler: Handler) -> contextlib.AbstractContextManager[None]:
    """While entered, Ctrl-C calls `handler`, unless the process ignores it."""
    return at_signal(signal.SIGINT, handler, (leave, signal.default_int_handler))


@contextlib.contextmanager
def at_signal(number: signal.Signals, handler: Handler, instead_of: Sequence[object]) -> Iterator[None]:
    """While entered, a signal calls `handler` where it would meet one of `instead_of`; only in the main thread."""
    before = signal.getsignal(number)
    if before not in instead_of or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def leave(_number: int, _frame: FrameType | None) -> None:
    """Leave at once. For the time before a command has begun: most of it is imports, and packages that try to import
    others, as torch does NumPy, take a KeyboardInterrupt for one that is missing, and go on."""
    try:
        os.write(2, b"fusestep: interrupted\n")
    finally:  # also where nobody reads that: an error would go the way of the KeyboardInterrupt
        os._exit(INTERRUPTED)


def mendable(error: Exception) -> str | None:
    """The sentence for an error that a person can mend, or None for a defect of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        return extra and f"the package {package} is not installed; run pip install 'fusestep[{extra}]'."
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where} ({os.strerror(error.errno)}); free some space or choose another folder."
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return (
            f"{error.filename or 'a file'} would be larger than the limit of a file's size allows "
            f"({os.strerror(error.errno)}); raise the limit (ulimit -f), or choose another folder."
        )
    if isinstance(error, OSError) and error.filename and error.errno in TROUBLE_WITH_PATHS:
        is_path_wrong = error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
        what = "correct the path" if is_path_wrong else mend(error, str(error.filename))
        return f"{error.filename} cannot be used ({os.strerror(error.errno)}); {what}, or choose another."
    return _out_of_memory(error)


def _out_of_memory(error: Exception) -> str | None:
    """The sentence for memory that ran out on a GPU or on the host; the trainer adds what filled it."""
    if not memory.ran_out(error):
        return None
    mend = "take a smaller model or batch."
    if memory.ran_out_on_gpu(error):
        peak = sys.modules["torch"].cuda.max_memory_allocated() / memory.GIB
        return f"out of GPU memory, after a peak of {peak:.2f} GiB; {mend}"
    return f"out of memory on this machine; {mend}"
