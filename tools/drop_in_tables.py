"""Write the tables of names in docs/apex.md and docs/transformer-engine.md from the shims themselves.

    python tools/drop_in_tables.py [--check]

Each shim module says in `__all__` what it serves and in `NOT_SERVED` what it does not, with what to use instead. What
stands between a page's marks is replaced; with --check nothing is written, and the exit status is 1 if a page is not
current.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SHIMS = ROOT / "src" / "fusestep" / "compat" / "shims"

#: The pages, and the package that each is about.
PAGES = {"apex.md": "apex", "transformer-engine.md": "transformer_engine"}

#: Modules that a package brings beside itself. The names of a table without a module are whole as they are.
BESIDE = {"apex": {"amp_C": "amp_C", "apex_C": "apex_C", "": "apex._extensions"}}

_MARKED = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def modules_of(package: str) -> Iterator[tuple[str, ModuleType]]:
    """(name, module) of a package's public modules, parents first."""
    found = importlib.import_module(package)
    yield package, found
    for info in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            yield info.name, importlib.import_module(info.name)
    for name, path in BESIDE.get(package, {}).items():
        yield name, importlib.import_module(path)


def served(package: str) -> str:
    """A row for each object, under the shortest of its paths; aliases share it."""
    rows: dict[int, tuple[list[str], str]] = {}
    for module_name, module in modules_of(package):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, ModuleType) or name.startswith("__"):
                continue
            paths, _ = rows.setdefault(id(value), ([], described(value)))
            paths.append(f"{module_name}.{name}")
    lines = ["| name | served by | also as |", "| --- | --- | --- |"]
    for paths, what in sorted(rows.values(), key=lambda row: min(row[0], key=path_key).lower()):
        first, *others = sorted(paths, key=path_key)
        lines.append(f"| `{first}` | {what} | {', '.join(f'`{other}`' for other in others)} |")
    return "\n".join(lines)


def path_key(path: str) -> tuple[int, str]:
    """Short paths first."""
    return path.count("."), path


def described(value: Any) -> str:
    """What serves a name: as its class says, else the first sentence of its docstring."""
    by = getattr(value, "SERVED_BY", None) or getattr(value, "served_by", None)
    if isinstance(by, str) and by:
        return f"`{by}`"
    text = inspect.getdoc(value) if callable(value) or inspect.isclass(value) else None
    if not text:
        return ""
    first = " ".join(text.split("\n\n")[0].split())
    return cell(first.split(". ")[0].removesuffix("."))


def refused(package: str) -> str:
    """A row for each name that is not served, under the first module that says so."""
    rows: dict[str, tuple[str, str, bool]] = {}
    for module_name, module in modules_of(package):
        for name, (instead, planned) in getattr(module, "NOT_SERVED", {}).items():
            rows.setdefault(name, (f"{module_name}.{name}".removeprefix("."), instead, planned))
    lines = ["| name | instead | planned |", "| --- | --- | --- |"]
    for path, instead, planned in sorted(rows.values(), key=lambda row: row[0].lower()):
        lines.append(f"| `{path}` | {cell(instead)} | {'yes' if planned else 'no'} |")
    return "\n".join(lines)


def arguments(package: str) -> str:
    """Arguments that are taken and change nothing, where the package lists them."""
    table: dict[str, str] = _arguments(package).WITHOUT_EFFECT
    return "\n".join(["| argument | why it changes nothing |", "| --- | --- |"] + [
        f"| `{name}` | {cell(why)} |" for name, why in table.items()
    ])  # fmt: skip


def values(package: str) -> str:
    """Arguments of which some values are refused, where the package lists them."""
    table: dict[str, tuple[tuple[Any, ...], str, bool]] = _arguments(package).REFUSED
    lines = ["| argument | served | instead of another value | planned |", "| --- | --- | --- | --- |"]
    for name, (usual, instead, planned) in table.items():
        shown = ", ".join(f"`{one!r}`" for one in usual)
        lines.append(f"| `{name}` | {shown} | {cell(instead)} | {'yes' if planned else 'no'} |")
    return "\n".join(lines)


def _arguments(package: str) -> Any:
    return importlib.import_module(f"{package}.pytorch._arguments")


def cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|")


#: What a mark asks for.
TABLES = {"served": served, "refused": refused, "arguments": arguments, "values": values}


def written(text: str, package: str) -> str:
    """A page with its tables as the shims have them now."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match.group(1)}\n{TABLES[match.group(2)](package)}\n\n{match.group(3)}"

    return _MARKED.sub(replaced, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the drop-in's tables of names.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not current")
    check = parser.parse_args().check
    sys.path.insert(0, str(SHIMS))
    stale = []
    for page, package in PAGES.items():
        path = DOCS / page
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        wanted = written(text, package)
        if text == wanted:
            continue
        stale.append(page)
        if not check:
            path.write_text(wanted, encoding="utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run python tools/drop_in_tables.py")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
