"""`fusestep run`: a script whose `apex` and `transformer_engine` are fusestep's, and a line at the end that says so.

The script gets this process: its `__main__`, arguments, path, working folder, signals, exit status and tracebacks are
those of `python SCRIPT`. What it starts inherits the shims through PYTHONPATH, and tells what it was served through a
folder that the environment names.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fusestep import durable
from fusestep.compat import report, settings
from fusestep.compat.install import install_shims, is_shim
from fusestep.errors import UserError

MENDABLE = 2

DESCRIPTION = """Run a script, or with -m a module, whose imports of apex and transformer_engine resolve to fusestep,
also in the processes that it starts. Everything after SCRIPT or MODULE belongs to it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for; returns when the script has ended by itself.

    Leaves through SystemExit with the script's status, and with 2 after a sentence for what a person has to mend.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        ending = _prepare(options)
        program = _module(options.target) if options.is_module else _script(options.target)
    except _NothingToRunError as error:
        print(f"fusestep run: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(MENDABLE)
    except Exception as error:
        # A source that is no Python, or a package of the module's that raises as it is imported.
        ending.has_begun = True
        _show(error)
        sys.exit(1)
    sys.argv[:] = [program.argument, *options.arguments]
    sys.modules["__main__"] = program.main
    ending.has_begun = True
    _execute(program.code, program.main)


class _NothingToRunError(UserError):
    """What a person asked for cannot be run; an error of the script's own is another matter."""


class _Usage(argparse.HelpFormatter):
    """Help that begins as that of the other commands."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)


@dataclass(frozen=True)
class _Options:
    target: str
    arguments: list[str]
    is_module: bool
    te_layout: str | None
    report: Path | None


def parser() -> argparse.ArgumentParser:
    """Of the command's own options."""
    parser = argparse.ArgumentParser(
        prog="fusestep run",
        usage="fusestep run [OPTIONS] SCRIPT [ARGS…] | -m MODULE [ARGS…]",
        description=DESCRIPTION,
        formatter_class=_Usage,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--te-layout",
        metavar="bshd",
        help="read (batch, sequence, width) in Transformer Engine's layers where the script names no layout",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was served as JSON")
    # For the help alone: what it names, and all behind that, is split off first.
    parser.add_argument("-m", metavar="MODULE", help="run a module, as python -m does")
    return parser


def _parse(arguments: Sequence[str]) -> _Options:
    own, program, is_module = split(list(arguments))
    known = parser()
    found = known.parse_args(own)
    if not program:
        known.error("name a SCRIPT, or -m MODULE")
    return _Options(program[0], program[1:], is_module, found.te_layout, found.report)


def split(arguments: list[str]) -> tuple[list[str], list[str], bool]:
    """Our options; the script or module, with all that is behind it whatever it looks like; whether it is a module."""
    place = 0
    while place < len(arguments):
        argument = arguments[place]
        if argument == "--":
            return arguments[:place], arguments[place + 1 :], False
        if argument == "-m":
            return arguments[:place], arguments[place + 1 :], True
        if argument.startswith("-m"):
            return arguments[:place], [argument[2:], *arguments[place + 1 :]], True
        if not argument.startswith("-"):
            return arguments[:place], arguments[place:], False
        place += 2 if argument in ("--te-layout", "--report") else 1
    return arguments, [], False


@dataclass
class _Ending:
    """What is left to do when the process ends.

    Attributes:
        process: the one that was started; a fork of it may end as its parent would.
        folder: of the events; removed by the run that made it, which is also the one that speaks.
        file: for the JSON, or None.
        has_begun: whether there was anything to run.
    """

    process: int
    folder: Path
    is_outermost: bool
    file: Path | None
    options: _Options
    has_begun: bool = False

    def __call__(self) -> None:
        if os.getpid() != self.process:
            return
        if self.has_begun:
            self._tell()
        if self.is_outermost:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self) -> None:
        for name in ("apex", "transformer_engine"):
            used = sys.modules.get(name)
            if used is not None and not is_shim(used):
                report.package(name, f"the script's own in {getattr(used, '__file__', None)}, not fusestep")
        found = report.merged(self.folder)
        if self.file is not None:
            said = asdict(self.options) | {"report": str(self.file), "te_layout": settings.te_layout() or "sbhd"}
            durable.write_together({self.file: json.dumps(found.as_dict() | said, indent=2) + "\n"})
        if self.is_outermost and os.environ.get("RANK", "0") == "0":
            # A script may have closed its stderr.
            with contextlib.suppress(ValueError, OSError):
                for line in found.lines():
                    print(f"fusestep run: {line}", file=sys.__stderr__)


def _prepare(options: _Options) -> _Ending:
    """The path, the environment and what is said at the end."""
    if options.te_layout is not None:
        try:
            settings.checked_layout(options.te_layout, "--te-layout")
        except UserError as error:
            raise _NothingToRunError(str(error)) from None
    file = None if options.report is None else _of_this_rank(options.report.absolute())
    if file is not None and (file.is_dir() or durable.obstacle(file.parent) is not None or not file.parent.is_dir()):
        raise _NothingToRunError(
            f"--report is {options.report}, which cannot be written; name a file in a folder that exists."
        )
    if not sys.flags.safe_path:
        # Python put our own folder there; what belongs there is known once the script is found.
        del sys.path[0]
    install_shims(options.te_layout)
    outer = settings.report_folder()
    folder = Path(tempfile.mkdtemp(prefix="fusestep-run-")) if outer is None else outer
    os.environ[settings.REPORT_FOLDER] = str(folder)
    ending = _Ending(os.getpid(), folder, outer is None, file, options)
    # First in, last out: the line comes after whatever the script itself leaves to the end.
    atexit.register(ending)
    return ending


def _of_this_rank(file: Path) -> Path:
    """Ranks that torchrun starts with `fusestep run` each have a file; that of rank 0 has the name given."""
    rank = os.environ.get("RANK", "0")
    return file if rank == "0" else file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


@dataclass(frozen=True)
class _Program:
    """What to run: its code, its `__main__`, and the first of its arguments, its own name."""

    code: CodeType
    main: ModuleType
    argument: str


def _script(target: str) -> _Program:
    """A source file, a compiled one, or a folder or archive with a `__main__`, as `python TARGET` takes them."""
    path = os.path.realpath(target)
    if not os.path.exists(path):  # noqa: PTH110 (a script's path is a string everywhere in Python)
        raise _NothingToRunError(f"there is no file {target}; name a script, or -m and a module.")
    if os.path.isdir(path) or not path.endswith((".py", ".pyc")):  # noqa: PTH112
        entry = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118 (not made shorter, as in Python)
        spec = PathFinder.find_spec("__main__", [entry])
        if spec is not None:
            sys.path.insert(0, entry)
            return _Program(_code(spec), _main_module(spec, spec.origin), target)
    if os.path.isdir(path):  # noqa: PTH112
        raise _NothingToRunError(f"{target} is a folder without a __main__.py; name a script, or -m and a module.")
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(path))  # noqa: PTH120
    file = os.path.abspath(target)  # noqa: PTH100 (which keeps the link's name, as Python does)
    main = _main_module(None, file)
    if path.endswith(".pyc"):
        main.__loader__ = loader = SourcelessFileLoader("__main__", file)
        code = loader.get_code("__main__")
        assert code is not None
        return _Program(code, main, target)
    main.__loader__ = source = SourceFileLoader("__main__", file)
    return _Program(compile(source.get_data(file), file, "exec", dont_inherit=True), main, target)


def _module(name: str) -> _Program:
    """A module, or a package's `__main__`, as `python -m NAME` takes them."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    sys.argv[:] = ["-m"]
    spec = _found(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found(f"{name}.__main__")
    if spec is None:
        raise _NothingToRunError(f"there is no module {name} that can be run; name one, or a script without -m.")
    return _Program(_code(spec), _main_module(spec, spec.origin), spec.origin or name)


def _found(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # The module or a package that holds it is not there; what they import themselves is their own affair.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _code(spec: ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    code: CodeType | None = loader.get_code(spec.name)
    if code is None:
        raise _NothingToRunError(f"{spec.name} has no Python code that could be run; name another module.")
    return code


def _main_module(spec: ModuleSpec | None, file: str | None) -> ModuleType:
    """A `__main__` as Python makes it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __file__=file, __spec__=spec, __cached__=None)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    if spec is not None:
        main.__dict__.update(__package__=spec.parent, __loader__=spec.loader, __cached__=spec.cached)
    return main


def _execute(code: CodeType, main: ModuleType) -> None:
    try:
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        stopped = error
    else:
        return
    _show(stopped)
    if isinstance(stopped, KeyboardInterrupt):
        # Raised again, so that the process ends by the signal, as the shell expects; it has been shown already.
        sys.excepthook = lambda *_: None
        raise stopped
    sys.exit(1)


def _show(error: BaseException) -> None:
    """What Python says of an exception that nobody caught, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
