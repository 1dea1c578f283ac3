"""Bound calls of a CPU device as one launch, for steps of few tokens.

A driver's in-order queue ends one kernel, wakes its threads and begins the next: 13 us of each of
150 launches on two threads, and as much again until all of them work, where a step of a small model
computes 0.1 ms. Here the kernels of all calls are functions of one program, and one kernel
(`kernels/fused_launch.cl`, a megakernel) runs them by a table; its work-groups, one for each
thread, hand over by counters in memory.

A kernel reads its arguments from the table, buffers as addresses. That is for devices whose memory
is the host's and whose kernels are work-items on threads: a work-group of one is then a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from hetero.backends.opencl.calls import KernelLaunch, Native, OpenCLCall
from hetero.backends.opencl.failures import decoded
from hetero.backends.opencl.fused_program import Called, FusedProgram
from hetero.backends.opencl.kernel_files import source
from hetero.backends.opencl.program_source import OPTIONS, ProgramSource
from hetero.backends.opencl.resources import DeviceMemory, Resources, Scratch
from hetero.backends.opencl.self_test.program_compiler import Variant, argument_kinds
from hetero.backends.optional import Stages

HEAD: Final = 4  # words of an entry before its arguments
LINE: Final = 16  # 32-bit words
BUFFERS: Final = 8  # parameters of the kernel `addresses`
PATIENCE: Final = 400_000  # cycles, about 0.15 ms: see fused_launch.cl
ARGUMENTS: Final = {
    "b": "(__global void *)a[{}]",
    "i": "(int)a[{}]",
    "u": "(uint)a[{}]",
    "f": "as_float((uint)a[{}])",
}
_ATTRIBUTE = r"(?:__attribute__\(\((?:[^()]|\([^()]*\))*\)\)\s*)"
_KERNEL = re.compile(rf"__kernel\s+{_ATTRIBUTE}?void\s+(\w+)\(")
_DECLARED = (
    re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE),
    re.compile(rf"^\s*INLINE\s+{_ATTRIBUTE}?\w+(?:\([^)]*\))?\s+(\w+)\(", re.MULTILINE),
    re.compile(rf"^typedef\s[^;{{]*?\b(\w+)\s*{_ATTRIBUTE}?;", re.MULTILINE),
    re.compile(r"^}\s*(\w+);", re.MULTILINE),
    re.compile(r"^ACCESS\(\w+, \w+, \w+, (\w+), \w+\)", re.MULTILINE),
    re.compile(r"^ACCESS\(\w+, \w+, \w+, \w+, (\w+)\)", re.MULTILINE),
    _KERNEL,
)
_GROUP = re.compile(r"\bget_(?:global|group)_id\(([01])\)")
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")


class _Entry(NamedTuple):
    """A launch; `called` is its kernel, the program by its identity."""

    launch: KernelLaunch
    values: Sequence[Native]
    waits: bool
    called: tuple[int, str, str]


def fuse(
    device: Resources, runs: Sequence[Stages], *, compiles: bool = True
) -> list[OpenCLCall] | None:
    """Return each run of calls as one, or None for devices and calls that cannot be fused.

    Calls of one stage do not wait for each other, where they can do without. None, too, where the
    program is not compiled yet, unless this call `compiles` it.
    """
    if not device.fuses:
        return None
    calls = [call for run in runs for stage in run for call in stage]
    if any(not isinstance(call, OpenCLCall) or call.device is not device for call in calls):
        return None
    entries = [list(_entries(run)) for run in runs]
    every = [entry for run in entries for entry in run]
    kernels = {entry.called: device.programs.source_of(entry.launch.program) for entry in every}
    plain = all(map(_is_plain, kernels.values()))
    if not plain or any(set(entry.launch.local_size) != {1} for entry in every):
        return None
    called = tuple(Called(source, *key[1:]) for key, source in kernels.items())
    width = HEAD + max(len(entry.values) for entry in every)
    made = _program(device, called, width, compiles=compiles)
    if made is None:
        return None
    numbers = {key: made.numbers[one] for key, one in zip(kernels, called, strict=True)}
    where = _addresses(device, made.program, every)
    fused = []
    for run, stages in zip(entries, runs, strict=True):
        table = _table(run, numbers, where, made.width)
        state = device.constant(np.zeros((len(run) + 1) * LINE, dtype=np.int32), written=True)
        args = (len(run), device.constant(table), state)
        launch = KernelLaunch(made.program, "fused_launch", (device.threads,), (1,), args)
        members = [call for stage in stages for call in stage]
        name = f"{len(members)} calls, the last of which is {members[-1].name}"
        fused.append(OpenCLCall(device, name, members[-1].m, [launch], {}, keep=tuple(members)))
    return fused


def _program(
    device: Resources, called: tuple[Called, ...], width: int, *, compiles: bool
) -> FusedProgram | None:
    """Return a program of at least these kernels, whose entries are at least so wide."""
    for made in device.fused_programs:
        if made.width >= width and all(one in made.numbers for one in called):
            return made
    source, programs = _fused_source(called, width, PATIENCE), device.programs
    program = programs.take(source) if compiles else programs.known(source)
    if program is None:
        return None
    made = FusedProgram(program, {one: number for number, one in enumerate(called)}, width)
    device.fused_programs.append(made)
    return made


def _table(
    run: Sequence[_Entry],
    numbers: Mapping[tuple[int, str, str], int],
    where: Mapping[int, int],
    width: int,
) -> npt.NDArray[np.uint64]:
    """Return the table that fused_launch.cl reads: a row for each launch."""
    table = np.zeros((len(run), width), dtype=np.uint64)
    for row, entry in zip(table, run, strict=True):
        wide, groups = entry.launch.global_size[0], math.prod(entry.launch.global_size)
        words = [_word(value, where) for value in entry.values]
        row[: HEAD + len(words)] = (numbers[entry.called], wide, groups, entry.waits, *words)
    return table


def _entries(stages: Stages) -> Iterator[_Entry]:
    for stage in stages:
        calls = [call for call in stage if isinstance(call, OpenCLCall)]
        independent = all(len(call.launches) == 1 and not _uses_scratch(call) for call in calls)
        for i, call in enumerate(calls):
            for launch, values in call.launches:
                called = id(launch.program), launch.name, argument_kinds(values)
                yield _Entry(launch, values, not (independent and i), called)


def _uses_scratch(call: OpenCLCall) -> bool:
    """Return whether a call works in memory that other calls use too."""
    return any(isinstance(value, Scratch) for _, values in call.launches for value in values)


@lru_cache(maxsize=256)
def _is_plain(program: ProgramSource) -> bool:
    """Return whether its kernels need no more than `_functions` provides."""
    left = _GROUP.sub("", program.text).replace("get_local_id(0)", "")
    own = [option for option in program.options if not option.startswith("-D")]
    return "get_" not in left and own == list(OPTIONS)


def _word(value: Native, where: Mapping[int, int]) -> int:
    if isinstance(value, cl.Buffer):
        return where[value.int_ptr]
    if isinstance(value, np.float32):
        return int(value.view(np.uint32))
    return int(value) & 0xFFFFFFFF


def _addresses(device: Resources, program: cl.Program, entries: Sequence[_Entry]) -> dict[int, int]:
    """Return the address of every buffer by its handle; a kernel reports each once."""
    values = (value for entry in entries for value in entry.values)
    buffers = {x.int_ptr: x for x in values if isinstance(x, DeviceMemory)}
    if unknown := [buffer for buffer in buffers.values() if not buffer.address]:
        _ask(device, program, unknown)
    return {handle: buffer.address for handle, buffer in buffers.items()}


def _ask(device: Resources, program: cl.Program, unknown: Sequence[DeviceMemory]) -> None:
    addresses = np.zeros(BUFFERS, dtype=np.uint64)
    out = device.constant(addresses, written=True)
    kernel = cl.Kernel(program, "addresses")
    kinds = "i" + "b" * (1 + BUFFERS)
    variant = Variant("addresses", (1,), (1,), kinds)
    with decoded("asking for addresses"), device.programs.first_launch(program, variant):
        for start in range(0, len(unknown), BUFFERS):
            part = unknown[start : start + BUFFERS]
            kernel.set_arg(0, np.int32(len(part)))
            kernel.set_arg(1, out)
            for at in range(BUFFERS):
                kernel.set_arg(2 + at, part[min(at, len(part) - 1)])
            cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
            device.queue.finish()
            for buffer, address in zip(part, map(int, addresses), strict=False):
                buffer.address = address


# --- the program ----------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _fused_source(called: tuple[Called, ...], width: int, patience: int) -> ProgramSource:
    """Return the program of all kernels' functions, and the kernel that calls them.

    `run_group` calls one by its number.
    """
    prefixes: dict[str, str] = {}
    texts: list[str] = []
    cases: list[str] = []
    for number, one in enumerate(called):
        prefix = prefixes.get(one.source.digest)
        if prefix is None:
            prefix = prefixes[one.source.digest] = f"c{len(prefixes)}_"
            texts.append(_functions(one.source, prefix))
        given = ", ".join(ARGUMENTS[kind].format(at) for at, kind in enumerate(one.kinds))
        cases.append(f"    case {number}: {prefix}{one.kernel}(group, {given}); break;\n")
    run_group = (
        "__attribute__((always_inline)) inline void run_group(\n"
        "    const int which, const int2 group, __global const ulong *a) {\n"
        f"  switch (which) {{\n{''.join(cases)}  }}\n}}\n"
    )
    macros = f"#define ENTRY {width}\n#define PATIENCE {patience}\n"
    text = "".join([*texts, run_group, macros, source("fences.cl"), source("fused_launch.cl")])
    return ProgramSource("fused_launch.cl", text, OPTIONS)


def _functions(program: ProgramSource, prefix: str) -> str:
    """Return a program's text with its kernels as functions of a group, after its macros.

    All its declarations get the prefix, since other programs declare the same names.
    """
    given = (option[2:].partition("=") for option in program.options if option[:2] == "-D")
    text = "".join(f"#define {name} {value}\n" for name, _, value in given) + program.text
    text = re.sub(r"//.*", "", text)
    own = {name for pattern in _DECLARED for name in pattern.findall(text)}
    text = _KERNEL.sub(r"INLINE void \1(const int2 called_group, ", text)
    text = _GROUP.sub(r"called_group.s\1", text).replace("get_local_id(0)", "0")
    return _WORD.sub(lambda word: prefix + word[0] if word[0] in own else word[0], text)
