"""What a profile for one model measures."""

from __future__ import annotations

import pytest

from hetero.backends.formats import WeightFormat
from hetero.measuring.profiling import model_options
from hetero.measuring.step_cost import measure_step_s
from hetero.models import model_spec
from hetero.profiler.non_matmul_ops import BLOCKS, wanted_ops
from hetero.profiler.options import Options
from hetero.profiler.records import DeviceProfile
from hetero.profiler.timing import cold_bytes
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario

W4, W8 = WeightFormat.W4A16, WeightFormat.W8A16


@pytest.fixture(autouse=True)
def _caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.profiler.timing.last_level_cache_bytes", lambda: 32 << 20)


def test_a_small_model_is_measured_as_it_lies_in_the_caches() -> None:
    spec = model_spec("demo")
    found = Options(**model_options(spec, (W4,)))
    weights = sum(x.count * x.n * x.k for x in spec.matmuls)
    assert found.cold_bytes == pytest.approx(weights * 4.5 / 8, abs=1)
    assert found.cold_bytes < cold_bytes()
    assert {(shape.n, shape.k) for shape in found.shapes} == {(x.n, x.k) for x in spec.matmuls}
    assert found.graph == spec
    assert found.own_ops


def test_of_several_formats_the_largest_counts() -> None:
    spec = model_spec("demo")
    sizes = [model_options(spec, formats)["cold_bytes"] for formats in ((W4,), (W8,), (W4, W8))]
    assert sizes[0] < sizes[1] == sizes[2]


def test_a_model_of_the_default_sizes_adds_nothing() -> None:
    found = Options(**model_options(model_spec("random:llama-3.2-1b"), (W4,)))
    alone = wanted_ops(W4, quick=False, blocks=BLOCKS, graph=None)
    with_it = wanted_ops(W4, quick=False, blocks=BLOCKS, graph=found.graph)
    assert len(with_it) == len(alone)
    assert found.cold_bytes is not None
    assert found.cold_bytes > cold_bytes()


@pytest.mark.full
def test_what_a_step_costs_besides_its_launches_is_part_of_every_prediction() -> None:
    seconds = measure_step_s(model_bytes=1 << 16)
    assert 1e-6 < seconds < 0.1
    spec, profile = model_spec("llama-3-8b"), DeviceProfile.load("snapdragon-8-gen-3")
    host = profile.host_sync.model_copy(update={"step_s": seconds})
    for mode in ("gpu", "npu"):
        for m, phase in ((1, "decode"), (64, "prefill")):
            without, with_it = (
                Planner(spec, found).single(Scenario(phase, m), mode)  # type: ignore[arg-type]
                for found in (profile, profile.model_copy(update={"host_sync": host}))
            )
            assert without is not None
            assert with_it is not None
            first_s = (
                profile.sync["gpu"].submit_empty_s if with_it.non_matmul.device == "gpu" else 0.0
            )
            assert with_it.seconds - without.seconds == pytest.approx(seconds + first_s)
            assert with_it.options == without.options


def test_a_run_for_another_size_is_not_continued() -> None:
    assert Options().header() != Options(cold_bytes=1 << 20).header()
    assert Options().header() != Options(blocks=BLOCKS[:1]).header()
    small, large = (Options(graph=model_spec(name)).header() for name in ("demo", "opt-1.3b"))
    assert small != large
