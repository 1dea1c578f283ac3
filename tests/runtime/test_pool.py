"""Invariant 4: one pool, the same addresses on both devices, no copy in a step."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero import LLM
from hetero.backends import null
from hetero.backends.host.affinity import assign_cores, pinned, unpinned
from hetero.backends.host.hugepages import HUGE_BYTES
from hetero.backends.memory import HostBuffer
from hetero.backends.protocol import DeviceKind
from hetero.models import open_model
from hetero.runtime.kv.kv_cache import CacheLayout, KvCache
from hetero.runtime.pool import FLOAT32, ActivationPool, nbytes_of
from hetero.runtime.slot_refs import SlotRef
from hetero.runtime.step_cache import MAX_STEPS
from hetero.solver.handmade import layer_level
from tests.runtime.models import tiny_model

cl = pytest.importorskip("pyopencl")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: Any) -> Any:
    folder = str(tiny_model(tmp_path_factory.mktemp("tiny")))
    plan = layer_level(open_model(folder).spec())
    with LLM(folder, plan=plan) as opened:
        assert opened.plan.devices() == {"gpu", "npu"}
        yield opened


def test_both_devices_see_the_same_bytes_at_the_same_address(llm: LLM) -> None:
    gpu: Any = llm.engine.devices["gpu"]
    for slot in ("h", "qkv", "k_cache.0", "logits"):
        tensor = (llm.context.cache if "cache" in slot else llm.engine.deployment.pool)[slot]
        view, _ = cl.enqueue_map_buffer(
            gpu.queue,
            gpu.map(tensor.buffer),
            cl.map_flags.READ,
            0,
            (tensor.buffer.nbytes,),
            np.uint8,
        )
        assert view.ctypes.data == tensor.address == tensor.array.ctypes.data
        view.base.release(gpu.queue)


def test_a_generation_copies_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = llm.engine.devices["gpu"]
    before = gpu.copies
    for name in ("enqueue_copy", "enqueue_fill_buffer"):
        monkeypatch.setattr(cl, name, lambda *_, **__: pytest.fail("a step enqueued a copy"))
    llm.generate([5, 6, 7], max_tokens=5)
    assert gpu.copies == before == 0


def test_a_step_is_lowered_once_per_phase_and_length(llm: LLM) -> None:
    engine = llm.engine
    first = engine.steps.step(llm.context, "prefill", 7)
    assert engine.steps.step(llm.context, "prefill", 7) is first
    assert engine.steps.step(llm.context, "prefill", 8) is not first
    for m in range(9, 9 + MAX_STEPS):
        engine.steps.step(llm.context, "prefill", m)
    assert engine.steps.step(llm.context, "prefill", 7) is not first, "old steps are let go"


@pytest.mark.full
def test_kernels_of_cuts_that_no_step_has_are_let_go(llm: LLM) -> None:
    engine = llm.engine
    mapped = engine.deployment.kernels._mapped
    engine.steps.step(llm.context, "decode", 1)
    assert {key[1] for key in mapped} == {"gpu"}
    held = len(mapped)
    llm.generate([5, 6, 7], max_tokens=3)
    assert len(mapped) == held, "steps share the kernels of equal cuts"
    engine.deployment.lower()
    gc.collect()
    assert not [key for key in mapped if key[0] != "lm_head"]


def test_layer_level_puts_matmuls_of_a_prompt_on_the_npu_and_the_rest_on_the_gpu(llm: LLM) -> None:
    kinds: dict[DeviceKind, set[str]] = {"gpu": set(), "npu": set()}
    for launch in llm.engine.steps.step(llm.context, "prefill", 32).launches:
        kinds[launch.kind].add(launch.call.name.split("(")[0])
    assert kinds["npu"] == {"MatMul"}
    assert kinds["gpu"] >= {"Embed", "RMSNorm", "Rope", "Attention", "GatedAct"}


def test_pinning_gives_the_old_cores_back() -> None:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or a system without affinity: nothing is pinned")
    cores = assign_cores()
    assert cores.gpu != cores.control
    before = os.sched_getaffinity(0)
    with pinned(cores.control):
        assert os.sched_getaffinity(0) == {cores.control}
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_a_pinned_one_began_is_free() -> None:
    if assign_cores().control is None:
        pytest.skip("one core, or a system without affinity: nothing is pinned")
    every, found = os.sched_getaffinity(0), list[set[int]]()

    def look() -> None:
        found.append(os.sched_getaffinity(0))
        unpinned()
        found.append(os.sched_getaffinity(0))

    with pinned(assign_cores().control):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [{max(every)}, every]


def test_a_pinned_thread_gives_no_device_its_core() -> None:
    """Both by `pinned`, also within itself, and by the caller's own means."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or a system without affinity: nothing is pinned")
    cores, found = assign_cores(), []

    def ask() -> None:
        for core in (cores.gpu, cores.control):
            with pinned(core):
                with pinned(cores.control):
                    found.append(assign_cores())
                found.append(assign_cores())

    def held() -> None:
        assert cores.control is not None
        os.sched_setaffinity(threading.get_native_id(), {cores.control})
        found.append(assign_cores())

    ask()
    for target in (ask, held):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert found == [cores] * 9
    assert assign_cores() == cores


def test_ctrl_c_while_pinning_gives_the_old_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("a system without affinity: nothing is pinned")
    before = {0, 1}
    current = set(before)

    def set_then_interrupt(_thread: int, cores: set[int]) -> None:
        current.clear()
        current.update(cores)
        if cores != before:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _thread: set(before))
    monkeypatch.setattr(os, "sched_setaffinity", set_then_interrupt)
    with pytest.raises(KeyboardInterrupt), pinned(1):
        pass
    assert current == before


def test_ctrl_c_while_a_hold_ends_leaves_no_record_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or a system without affinity: nothing is pinned")
    before = os.sched_getaffinity(0)
    core, set_affinity = max(before), os.sched_setaffinity

    def set_then_interrupt(thread: int, cores: set[int]) -> None:
        set_affinity(thread, cores)
        if cores == before:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setaffinity", set_then_interrupt)
        with pytest.raises(KeyboardInterrupt), pinned(core):
            pass
    with pinned(core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.full
def test_a_long_context_costs_nothing_until_it_is_used(tmp_path: Path) -> None:
    """Memory after opening with a long context is that of a short one, within 40 MB."""
    folder = tiny_model(tmp_path, max_position_embeddings=60000)
    code = (
        "import sys; from hetero import LLM; "
        "llm = LLM(sys.argv[1], device='hetero', max_seq_len=int(sys.argv[2])); "
        "llm.generate([3, 4], max_tokens=3); "
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')][0])"
    )
    sizes = [
        int(
            subprocess.run(
                [sys.executable, "-c", code, str(folder), length],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for length in ("64", "60000", "64", "60000")
    ]  # the first two may compile kernels, and the compiler stays in memory
    assert sizes[3] - sizes[2] < 40_000


def test_activations_are_in_huge_pages_and_caches_are_not() -> None:
    device = null.open(kind="npu")
    asked: dict[int, bool] = {}
    allocate = device.allocate

    def recorded(nbytes: int, *, huge: bool = False) -> HostBuffer:
        asked[nbytes] = huge
        return allocate(nbytes, huge=huge)

    device.allocate = recorded  # type: ignore[method-assign]
    slots = {SlotRef("tokens"): ((1 << 10, 1 << 10), FLOAT32)}
    layout = CacheLayout(layers=2, kv_heads=4, capacity=1 << 10, head_dim=1 << 9)
    pool = ActivationPool(slots, device)
    assert KvCache(layout, device.allocate).nbytes == layout.nbytes
    assert asked == {nbytes_of(slots[SlotRef("tokens")]): True, layout.slot_bytes(0): False}
    assert pool["tokens"].buffer.address % HUGE_BYTES == 0


def test_a_cache_has_room_for_the_longest_padded_call(llm: LLM) -> None:
    capacity = llm.context.cache.layout.capacity
    assert (
        capacity >= llm.max_seq_len + llm.engine.deployment.pool.tokens // 2
    )  # the longest call, padded
    assert llm.engine.deployment.pool.nbytes > 0


def test_a_thread_that_is_held_is_not_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, a hold of the same core asks the system nothing; one of another core does."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or a system without affinity: nothing is pinned")
    control, other = assign_cores().control, assign_cores().gpu
    before = os.sched_getaffinity(0)
    with pinned(control):
        with monkeypatch.context() as patched:
            patched.setattr(os, "sched_setaffinity", None)
            with pinned(control):
                assert os.sched_getaffinity(0) == {control}
        with pinned(other):
            assert os.sched_getaffinity(0) == {other}
        with pinned(control):
            assert os.sched_getaffinity(0) == {control}
    assert os.sched_getaffinity(0) == before
