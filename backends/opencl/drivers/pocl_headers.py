"""The declarations of OpenCL's functions for PoCL's compiler, as few as kernels here name.

PoCL looks a program up in its cache by its preprocessed text, and that has all of Clang's
`opencl-c.h` in it: 18 552 lines, 25 of the 30 ms that a program takes at every start though its
kernels are compiled, and most of what compiling one takes at first. What is declared makes no code.
A kernel that names an omitted function does not compile: its self-test says so. Programs
of others in the same process, which do not define `OURS`, find all functions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hetero.backends.opencl.kernel_files import OURS, all_sources, sources_digest
from hetero.backends.opencl.self_test.kernel_store import KernelStore

HEADER: Final = "opencl-c.h"
REVISION: Final = "declarations of named functions 3"  # another one for another text
_RENAMES: Final = "_builtin_renames.h"  # names every function
_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_NUMBERED: Final = re.compile(r"(\w+?)\d+([a-z_]*)")
_CALLED: Final = re.compile(r"(\w+)\s*\(")
_NOTHING: Final = re.compile(r"^#if[^\n]*\n(?:#el[^\n]*\n)*#endif[^\n]*\n", re.MULTILINE)


def make_headers(folder: Path, target: Path, store: KernelStore) -> None:
    """Make `target` a copy of PoCL's folder of headers, with the short header.

    The header is kept in a store. Nothing is done where it is there: children use their parent's.
    """
    if (target / HEADER).exists():
        return
    target.mkdir(exist_ok=True)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    for path in paths:
        if path.name != HEADER:
            (target / path.name).symlink_to(path.resolve())
    states = [(path.name, (x := path.stat()).st_size, x.st_mtime_ns) for path in paths]
    facts = "\0".join([REVISION, str(folder.resolve()), str(states), sources_digest()])
    entry = hashlib.sha256(facts.encode()).hexdigest()
    header = (store.get(entry) or {}).get(HEADER)
    if header is None:
        others = (x.read_text("utf-8") for x in paths if x.name not in (HEADER, _RENAMES))
        code = _COMMENT.sub("", "\n".join([*others, *all_sources().values()]))
        words = frozenset(re.findall(r"\w+", code))
        named, rest = short((folder / HEADER).read_text("utf-8"), words), folder.resolve() / HEADER
        header = f'#ifdef {OURS}\n{named}#else\n#include "{rest}"\n#endif\n'.encode()
        store.put(entry, {HEADER: header})
    try:
        (target / HEADER).write_bytes(header)
    except OSError:  # no room, or a limit of sizes: the whole header takes longer to read
        (target / HEADER).unlink(missing_ok=True)
        (target / HEADER).symlink_to(folder.resolve() / HEADER)


def short(text: str, words: frozenset[str]) -> str:
    """Return a header without the declarations of functions that are not among the words.

    Whole or on both sides of a number, which macros of kernels put there (`convert_float16`,
    `vstore_half4_rte`).
    """
    header = "".join(
        f"{statement}\n" for statement in _statements(_COMMENT.sub("", text))
        if statement.startswith("#") or _is_named(statement, words)
    )  # fmt: skip
    while True:
        shorter = _NOTHING.sub("", header)
        if shorter == header:
            return header
        header = shorter


def _is_named(statement: str, words: frozenset[str]) -> bool:
    names = set(_CALLED.findall(statement)) - {"__attribute__"}
    if not names or names & words:
        return True
    made = (_NUMBERED.fullmatch(name) for name in names)
    return any(x is not None and set(filter(None, x.groups())) <= words for x in made)


def _statements(text: str) -> Iterator[str]:
    """Yield directives and declarations, each as one text."""
    statement = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("#") and statement:  # in the middle of a declaration, or of none
            yield statement
            statement = ""
        statement += line
        if statement.startswith("#"):
            whole = not statement.endswith("\\")
            statement = statement if whole else statement.removesuffix("\\") + " "
        else:
            whole = statement.endswith((";", "}"))
            statement = statement if whole or not statement else statement + " "
        if whole and statement:
            yield statement
            statement = ""
    if statement.strip():
        yield statement
