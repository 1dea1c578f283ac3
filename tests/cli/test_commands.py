"""The list of commands: names without modules, and the modules behind the names."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from hetero.cli.commands import COMMANDS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_name_has_its_command(name: str) -> None:
    command = COMMANDS[name].load()
    assert command.name == name
    assert command.help.strip()
    assert len(COMMANDS[name].summary) <= 62  # a line of an 80-column terminal
    for module in COMMANDS[name].runs:
        assert find_spec(f"hetero.{module}") is not None


def printed_by(code: str) -> str:
    """What a process of its own prints, which must end well."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_list_of_commands_loads_none_of_them() -> None:
    code = (
        "import sys; from hetero.cli.app import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as ended:\n    assert not ended.code\n"
        "heavy = {'numpy', 'pydantic', 'pyopencl', 'onnxruntime', 'hetero.generation.llm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    told = printed_by(code)
    assert all(name in told for name in COMMANDS)


def test_the_help_of_a_command_loads_nothing_that_computes() -> None:
    """All of them, at once: one alone would not hide behind another."""
    code = (
        "import sys; from hetero.cli.app import main\n"
        f"for name in {sorted(COMMANDS)}:\n"
        "    try:\n        main([name, '--help'])\n"
        "    except SystemExit as ended:\n        assert not ended.code\n"
        "heavy = {'numpy', 'pyopencl', 'onnxruntime', 'hetero.generation.llm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    printed_by(code)


def test_a_generation_loads_no_compiler_and_no_profiler_run() -> None:
    code = (
        "import importlib, sys; from hetero.cli.commands import COMMANDS\n"
        "generate = COMMANDS['generate']; generate.load()\n"
        "for name in generate.runs:\n    importlib.import_module(f'hetero.{name}')\n"
        "others = {'hetero.compiling.npu_graphs', 'hetero.measuring.profiling'}\n"
        "others |= {'hetero.cli.plan', 'hetero.generation.embedding'}\n"
        "others |= {'hetero.measuring.contender', 'rich.console', 'jinja2', 'asyncio'}\n"
        # What plans, times or draws: a start whose decision is cached needs none of it.
        "others |= {'hetero.placement.' + x for x in ('by_profile', 'comparing', 'planning')}\n"
        "others |= {'hetero.profiler.' + x for x in ('cost', 'records', 'scaling', 'workload')}\n"
        "others |= {'hetero.solver.' + x for x in ('build', 'planner', 'prepared', 'options')}\n"
        "others |= {'hetero.solver.report.' + x for x in ('content', 'document', 'page')}\n"
        "others |= {'filelock', 'ml_dtypes', 'onnx', 'onnxruntime', 'scipy', 'sklearn', 'html'}\n"
        "assert not others & set(sys.modules), others & set(sys.modules)\n"
    )
    printed_by(code)
