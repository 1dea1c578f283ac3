"""Later OpenCL devices of a process get what they ask for, or say what the first one decided."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
START = """
import os, warnings
from hetero import LLM
from hetero.backends.opencl.drivers import loader
said = []
warnings.showwarning = lambda message, *_, **__: said.append(str(message))
def places():
    ((_, workers),) = loader.loaded().workers.items()
    return {tuple(sorted(os.sched_getaffinity(x))) for x in workers}
every, first = tuple(sorted(os.sched_getaffinity(0))), (min(os.sched_getaffinity(0)),)
def choice(llm):
    found = llm.generate("Once", max_tokens=2).stats.choice
    assert found == llm.choice.reason
    return found
"""


def run(code: str, tmp_path: Path | None = None) -> None:
    """In a process of its own; skips where OpenCL has no threads on this processor."""
    env = dict(os.environ)
    if tmp_path is not None:
        env |= {"HETERO_SCALE": "off", "HETERO_NOTICES": "off"}
    whole = START + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_every_core_after_one() -> None:
    run(
        """
        with LLM("demo", device="gpu"), LLM("demo", device="gpu", gpu="opencl-cores") as llm:
            assert llm.devices.mode == "npu"
            assert choice(llm).startswith("running on npu (ort-cpu) alone because opencl: giving")
            assert choice(llm).endswith(", instead of: gpu alone, as asked for")
            assert len(said) == 1 and said[0] in choice(llm)
        """
    )


@pytest.mark.full
@pytest.mark.parametrize("second", ["gpu", "hetero"])
def test_one_core_next_to_every_core(second: str) -> None:
    run(
        f"""
        with LLM("demo", device="gpu", gpu="opencl-cores") as llm:
            assert choice(llm) == "gpu alone, as asked for"
            with LLM("demo", device={second!r}, profile="host") as other:
                assert other.devices.mode == {second!r}
                shown = ", ".join(map(str, every))
                note = f"OpenCL's threads run on cores {{shown}}, for another model that is open"
                assert choice(other).endswith(f"; {{note}}") and note in said
                assert places() == {{every}}  # those of the first model stay as they were
                llm.close()
                assert places() == {{first}}
        """
    )


@pytest.mark.full
def test_one_core_after_every_core() -> None:
    run(
        """
        LLM("demo", device="gpu", gpu="opencl-cores").close()
        with LLM("demo", device="gpu") as llm:
            assert places() == {first}
            assert f"; OpenCL runs with {len(every)} threads in this process" in choice(llm)
        with LLM("demo", device="gpu", gpu="opencl-cores") as llm:
            assert places() == {every}
            assert choice(llm) == "gpu alone, as asked for"
        """
    )


@pytest.mark.full
def test_equal_devices_have_nothing_to_say() -> None:
    run(
        """
        with LLM("demo", device="gpu"), LLM("demo", device="gpu") as llm:
            assert places() == {first}
            assert (choice(llm), said) == ("gpu alone, as asked for", [])
        """
    )


@pytest.mark.full
def test_auto_says_what_it_would_have_taken_in_a_process_of_its_own(tmp_path: Path) -> None:
    run(
        """
        from hetero.models import model_spec
        from hetero.placement.choice import PlacementRequest
        from hetero.placement.choosing import choose
        spec, request = model_spec("qwen2.5-0.5b"), PlacementRequest(mode="auto", seq_lens=(12,))
        alone = choose(spec, request)
        LLM("demo", device="gpu").close()
        later = choose(spec, request)
        assert later.gpu is None and "does not run yet" in later.reason
        would = [x for x in later.notes if x.startswith("opencl-cores would be faster")]
        assert len(would) == (alone.gpu == "opencl-cores"), (alone, later)
        """,
        tmp_path,
    )


@pytest.mark.full
def test_every_core_computes_answers_after_prompts_of_the_npu() -> None:
    """In one process: the NPU computes only while OpenCL does not; tokens are one device's."""
    run(
        """
        from hetero.models import open_model
        from hetero.solver.handmade import layer_level
        from hetero.solver.plan import NonMatmulDevices
        spec = open_model("demo", weights="f32").spec()
        apart = layer_level(spec, prefill="npu", decode="gpu").model_copy(
            update={"non_matmul": NonMatmulDevices(prefill="npu", decode="gpu")}
        )
        prompt = "Once upon a time there was a little girl who"
        with LLM("demo", plan=apart, gpu="opencl-cores", weights="f32") as llm:
            assert llm.devices.control_core is None
            assert places() == {every}
            ids = [llm.generate(prompt, max_tokens=30).tokens for _ in range(2)]
            counts = llm.engine.runner.last_run.counts
            assert counts["gpu"] and not counts.get("npu")
        with LLM("demo", device="npu", weights="f32") as llm:
            wanted = llm.generate(prompt, max_tokens=30).tokens
        assert ids == [wanted, wanted], (ids, wanted)
        shared = layer_level(spec, prefill="npu", decode="gpu")
        try:
            LLM("demo", plan=shared, gpu="opencl-cores", weights="f32")
        except Exception as error:
            assert "leaves the NPU no core" in str(error), error
        else:
            raise AssertionError("both devices work in prompts")
        """
    )
