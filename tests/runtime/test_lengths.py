"""Another context length at the next start: nothing is compiled for it, and the answers are the
same to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyopencl")

from hetero import LLM
from hetero.backends.opencl.self_test.program_compiler import Remote, Variant
from hetero.generation.loading import ModelLoader
from hetero.runtime.waits.trials import Trials
from tests.support.checkpoints import CASES, make_checkpoint

PROMPT = list(range(1, 50))  # longer than the windows


class Builds:
    """What a compiler is asked for: programs, and kernels at a work-group size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: set[str] = set()
        bring, known = Remote._restore, Remote._unpacked

        def brought(own: Any, entry: str, source: Any, variant: Variant | None) -> None:
            self.entries.add(entry)
            bring(own, entry, source, variant)

        def unpacked(own: Any, entry: str, folder: Path) -> bool:
            self.entries.add(entry)
            return known(own, entry, folder)

        monkeypatch.setattr(Remote, "_restore", brought)
        monkeypatch.setattr(Remote, "_unpacked", unpacked)

    def taken(self) -> set[str]:
        """Since the last time."""
        found, self.entries = self.entries, set()
        return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "kv"), [("llama-tied", "f16"), ("gemma2", "f16"), ("mistral-window", "q8")]
)
def test_a_start_with_another_length_compiles_nothing(
    case: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(next(x for x in CASES if x.name == case), tmp_path)
    # A note of this test's own: others run these models too, and prepare what they need.
    purpose = property(lambda loader: f"{tmp_path} {loader._whole_caches}")
    monkeypatch.setattr(ModelLoader, "purpose", purpose)
    # Whether a stream signal works is measured at every start, and has nothing to do with lengths.
    monkeypatch.setattr(Trials, "signals", lambda _: {})
    builds = Builds(monkeypatch)
    answers: list[list[bytes]] = []
    found: list[set[str]] = []
    for length, whole in ((90, False), (448, False), (61, True), (90, False)):
        options: Any = {"max_seq_len": length, "whole_caches": whole, "kv": kv}
        with LLM(str(tmp_path), device="gpu", gpu="opencl", **options) as llm:
            engine, context = llm.engine, llm.context
            logits = [engine.prefill(context, PROMPT).tobytes()]
            logits += [engine.decode(context, token).tobytes() for token in (7, 3)]
            logits.append(engine.verify(context, [9, 11, 13]).tobytes())
            answers.append(logits)
            found.append(builds.taken())
        own = found[-1] - found[0]
        assert not own, f"{len(own)} of {len(found[-1])} are of length {length} alone"
    assert answers == answers[:1] * len(answers)
    assert len(found[0]) > 10


@pytest.mark.full
def test_programs_of_another_length_are_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are built beside the rest of a start, and chains that were tried are not tried again."""
    make_checkpoint(next(x for x in CASES if x.name == "llama-tied"), tmp_path)
    tried = []
    monkeypatch.setattr(
        "hetero.runtime.step_runner.fused_results_match", lambda *_: tried.append(1) is None
    )
    for length in (64, 57, 120):
        with LLM(str(tmp_path), device="gpu", gpu="opencl", max_seq_len=length) as llm:
            llm.generate(PROMPT[:5], max_tokens=4)
    assert len(tried) <= 1
    with LLM(str(tmp_path), device="gpu", gpu="opencl", max_seq_len=57, kv="f32"):
        pass
    assert len(tried) <= 2
