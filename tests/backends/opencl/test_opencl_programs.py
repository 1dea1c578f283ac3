"""Programs that a model needed before are built by a thread, and waited for where they are used."""

from __future__ import annotations

import contextlib
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl

from hetero.backends.errors import DeviceError
from hetero.backends.opencl.device import OpenCLDevice
from hetero.backends.opencl.kernel_files import all_sources
from hetero.backends.opencl.program_cache import ProgramCache
from hetero.backends.opencl.program_source import ProgramSource
from hetero.backends.opencl.self_test import program_compiler
from hetero.backends.opencl.self_test.program_compiler import ProgramCompiler


class Notes(ProgramCompiler):
    """Makes an object for each program; says by which thread."""

    def __init__(self, notes: dict[str, bytes]) -> None:
        self.notes = notes
        self.built: list[tuple[str, str]] = []
        self.compiled: set[str] = set()
        self.fails = False

    def program(self, _context: Any, _device: Any, source: ProgramSource) -> Any:
        self.built.append((source.name, threading.current_thread().name[:15]))
        self.compiled.add(source.digest)
        return object()

    def known(self, context: Any, device: Any, source: ProgramSource) -> Any:
        if self.fails:
            raise DeviceError("opencl", "building", "CL_BUILD_PROGRAM_FAILURE")
        return self.program(context, device, source) if source.digest in self.compiled else None

    def variant(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def recall(self, entry: str) -> bytes | None:
        return self.notes.get(entry)

    def note(self, entry: str, content: bytes) -> None:
        self.notes[entry] = content


def use(compiler: Notes, what: str, *names: str) -> bool:
    """Programs that a model needs; one more behind it. Whether they were noted."""
    programs = ProgramCache(None, None, compiler)  # type: ignore[arg-type]
    with programs.prewarm(what) as known:
        for name in names:
            assert programs.get(name, {}) is programs.get(name, {})
    programs.get("rope.cl", {"N": len(names)})
    programs.close()
    return known


def test_what_was_used_is_built_ahead_by_a_thread_the_next_time() -> None:
    compiler = Notes({})
    assert not use(compiler, "a", "flag.cl", "norm.cl")
    assert {thread for _, thread in compiler.built} == {threading.current_thread().name[:15]}
    compiler.built.clear()
    assert use(compiler, "a", "norm.cl", "flag.cl")
    assert dict(compiler.built) == dict.fromkeys(
        ("flag.cl", "norm.cl", "rope.cl"), "hetero-programs"
    )
    assert not use(compiler, "b")


def test_a_program_without_files_is_built_ahead_by_its_text() -> None:
    """A fused launch's: of many programs."""
    compiler, source = Notes({}), ProgramSource("fused_launch.cl", "text", ("-D A",))
    for known in (False, True):
        programs = ProgramCache(None, None, compiler)  # type: ignore[arg-type]
        with programs.prewarm("a") as again:
            assert again == known
            assert (programs.known(source) is not None) == known
            assert programs.take(source) is programs.known(source)
        programs.close()
    assert compiler.built[-1] == ("fused_launch.cl", "hetero-programs")


def test_a_program_that_is_not_compiled_is_not_known() -> None:
    compiler, source = Notes({}), ProgramSource("fused_launch.cl", "text", ())
    programs = ProgramCache(None, None, compiler)  # type: ignore[arg-type]
    with programs.prewarm("a"):
        programs.take(source)
    programs.close()
    compiler.compiled.clear()
    compiler.built.clear()
    programs = ProgramCache(None, None, compiler)  # type: ignore[arg-type]
    with programs.prewarm("a"):
        assert programs.known(source) is None
    assert not compiler.built
    programs.close()


def test_what_is_not_compiled_any_more_is_built_where_it_is_used() -> None:
    compiler = Notes({})
    use(compiler, "a", "flag.cl")
    compiler.built.clear()
    compiler.compiled.clear()
    assert use(compiler, "a", "flag.cl")
    assert {thread for _, thread in compiler.built} == {threading.current_thread().name[:15]}


def test_an_error_of_a_program_is_raised_where_it_is_used_and_nowhere_else() -> None:
    compiler = Notes({})
    use(compiler, "a", "flag.cl")
    compiler.fails = True
    programs = ProgramCache(None, None, compiler)  # type: ignore[arg-type]
    with programs.prewarm("a"):
        programs.get("norm.cl", {})
    with pytest.raises(DeviceError, match="CL_BUILD_PROGRAM_FAILURE"), programs.prewarm("a"):
        programs.get("flag.cl", {})
    programs.close()


def test_a_note_of_removed_files_is_skipped() -> None:
    compiler = Notes({})
    use(compiler, "a", "flag.cl")
    compiler.notes = {k: v.replace(b"flag.cl", b"gone.cl") for k, v in compiler.notes.items()}
    assert use(compiler, "a", "norm.cl")
    for broken in (
        b"{", b"\xff", b"[" * 100_000, b'[["a", [1], ["flag.cl"]]]', b'[["a", [], []]]', b"7",
        b'[["a", [["b"]], "text"]]', b'[["flag.cl"], []]',
    ):  # fmt: skip
        compiler.notes = dict.fromkeys(compiler.notes, broken)
        assert not use(compiler, "a", "norm.cl"), broken[:20]


class Unfinished:
    """A program whose build ends on request."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def build(self, **_: Any) -> None:
        self.begun.set()
        assert self.end.wait(10)


def test_a_build_in_a_thread_leaves_the_warnings_of_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, before = Unfinished(), list(warnings.filters)
    monkeypatch.setattr(program_compiler, "uncached", lambda *_: program)
    source, device = ProgramSource("a", str(id(program)), ()), SimpleNamespace(name="a")
    build = getattr(program_compiler._build, "__wrapped__", program_compiler._build)
    thread = threading.Thread(target=build, args=(None, device, source))
    thread.start()
    assert program.begun.wait(10)
    with warnings.catch_warnings():  # leaving this restores the filters
        program.end.set()
        thread.join()
    assert list(warnings.filters) == before


def test_compilers_are_heard_where_others_build() -> None:
    """Not where a program of ours is built."""
    with program_compiler._quiet():
        cl.compiler_output("a warning")
    with pytest.warns(cl.CompilerWarning):
        cl.compiler_output("a warning")


@pytest.mark.full
def test_programs_of_others_find_every_function(device: OpenCLDevice) -> None:
    """Which no kernel here names."""
    kernel = "kernel void k(global float *x) { x[0] = tgamma(atan2pi(x[0], x[1])); }"
    assert "atan2pi" not in "".join(all_sources().values())
    cl.Program(device.context, kernel).build()
