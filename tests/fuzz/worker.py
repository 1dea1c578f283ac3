"""One coverage-guided fuzzer (atheris, libFuzzer's engine) in this process.

`python -m tests.fuzz.worker TARGET FOLDER [libFuzzer options]`; see `tests.fuzz.run`.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import atheris

INSTRUMENTED = [
    "hetero.models",
    "hetero.runtime.kv.session_file",
    "hetero.models.bundle",
    "hetero.solver.plan",
    "hetero.solver.report",
    "hetero.placement.planning",
    "hetero.profiler.records",
    "hetero.profiler.profile_files",
    "hetero.profiler.journal",
    "hetero.backends.qnn.graph_store",
    "json.decoder",
]
with atheris.instrument_imports(include=INSTRUMENTED):
    from tests.fuzz.targets import TARGETS

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

MEMORY_BYTES = 1 << 30


def limit_memory() -> None:
    """A request for more than 1 GB beyond what the process has now fails, and is a finding."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def mutator(target: Target) -> Callable[[bytes, int, int], bytes]:
    """Half of the mutations are the target's own, half of them the engine's."""

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        found = target.mutated(data, chance) if chance.random() < 0.5 else None
        if found is None or len(found) > max_size:
            return bytes(atheris.Mutate(data, max_size))
        return found

    return mutate


def write_seeds(target: Target, corpus: Path) -> None:
    """Seeds and the dictionary of a target."""
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds()):
        (corpus / f"seed-{index}").write_bytes(seed)
    words = "".join(f'"{word}"\n' for word in target.dictionary)
    (corpus.parent / f"{target.name}.dict").write_text(words, encoding="utf-8")


def main() -> None:
    """Fuzz until the options or a finding end it."""
    name, folder, *options = sys.argv[1:]
    corpus = Path(folder) / name
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[name](Path(scratch))
        write_seeds(target, corpus)
        limit_memory()
        own = {"custom_mutator": mutator(target)} if target.json else {}
        arguments = [f"-dict={folder}/{name}.dict", f"-artifact_prefix={folder}/found-{name}-"]
        atheris.Setup([sys.argv[0], *arguments, *options, str(corpus)], target, **own)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
