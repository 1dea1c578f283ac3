"""A closed model's memory is free at once, not when the collector of circles next runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from hetero import LLM
from hetero.placement.device_set import DeviceMode


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Circles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("mode", ["gpu", "npu", "hetero"])
def test_nothing_of_a_closed_model_waits_for_the_collector(mode: DeviceMode) -> None:
    with LLM("demo", device=mode, gpu="reference", npu="reference") as llm:
        llm.generate("Once upon a time", max_tokens=3)
        engine = llm._engine
        kept = {
            "engine": weakref.ref(engine),
            "kernels": weakref.ref(engine.deployment.kernels),
            "synchroniser": weakref.ref(engine.deployment.synchroniser),
            "pool": weakref.ref(engine.deployment.pool),
            "device": weakref.ref(next(iter(engine.devices.values()))),
        }
        del engine
    del llm
    assert [name for name, found in kept.items() if found() is not None] == []
