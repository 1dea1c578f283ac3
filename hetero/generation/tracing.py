"""A trace file of the steps that run inside a block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hetero.backends.host.files import is_replaceable
from hetero.errors import UserError
from hetero.runtime.engine import Engine


@contextmanager
def traced(
    engine: Engine, path: str | os.PathLike[str], about: Mapping[str, str]
) -> Iterator[None]:
    """Write a Chrome/Perfetto trace of all steps inside to `path`, with `about` as its metadata.

    Raises `UserError` before anything runs where the file cannot be written.
    """
    if not Path(path).absolute().parent.is_dir():
        raise UserError(f"cannot write the trace {path}: its folder is not there; create it")
    try:
        is_replaceable(path)
    except OSError as error:
        raise UserError(
            f"cannot write the trace {path} ({error.strerror}): choose another path"
        ) from error
    with engine.lock:
        engine.runner.start_trace()
    try:
        yield
    finally:
        with engine.lock:
            trace = engine.runner.stop_trace()
        trace.save(path, about=dict(about))
