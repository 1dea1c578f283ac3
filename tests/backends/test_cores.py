"""How many threads compute at once: allowed cores, and the quotas of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.backends.host import affinity
from hetero.backends.host.cgroup import cpu_quota

# Capacities as Linux computes them for a Snapdragon 8 Gen 3 (two A520, five A720 in two clusters,
# one X4), clocks of an X Elite in kHz (two of twelve cores are faster) and of a hybrid desktop.
GEN_3 = {"cpu_capacity": [379, 379, 924, 924, 924, 868, 868, 1024]}
X_ELITE = {"cpufreq/cpuinfo_max_freq": [3_417_600] * 10 + [4_012_800] * 2}
HYBRID = {"cpufreq/cpuinfo_max_freq": [5_300_000] * 2 + [5_500_000] * 2 + [4_000_000] * 4}
FAVOURED = {"cpufreq/cpuinfo_max_freq": [4_800_000] * 2 + [5_600_000] * 2 + [4_800_000] * 4}
V1 = "5:cpu,cpuacct:/a/b\n4:memory:/other\n"
V2 = "0::/a/b\n"


def quota_of(tmp_path: Path, groups: str, files: dict[str, str]) -> float | None:
    """The quota of a process in these groups, in a tree of these files."""
    (tmp_path / "self").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_quota(tmp_path / "self", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        (V2, {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"a/b/cpu.max": "max 100000\n"}, None),
        (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "20000 10000"}, 2.0),  # the pod's
        (V2, {"a/b/cpu.max": "300000 100000\n", "cpu.max": "50000 100000"}, 0.5),
        (V2, {"cpu.max": "100000 100000"}, 1.0),  # the path is the host's
        ("0::/\n", {"cpu.max": "400000 100000"}, 4.0),
        ("1:name=systemd:/x\n0::/a\n", {"unified/a/cpu.max": "70000 100000"}, 0.7),  # hybrid
        (V2, {"a/b/cpu.max": "0 0"}, None),
        (V2, {"a/b/cpu.max": "many"}, None),
        (V2, {}, None),
        ("", {"cpu.max": "100000 100000"}, None),
        (
            V1,
            {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "9"},
            None,
        ),
        (
            V1,
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "25000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "10000\n",
            },
            2.5,
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1.0),
        (
            "5:cpuset:/a\n",  # not the controller of quotas
            {"cpuset/a/cpu.cfs_quota_us": "1", "cpuset/a/cpu.cfs_period_us": "1"},
            None,
        ),
    ],
)
def test_the_quota_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], cpus: float | None
) -> None:
    assert quota_of(tmp_path, groups, files) == cpus


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None
    (tmp_path / "self").write_bytes(b"0::/\xff\n")
    assert cpu_quota(tmp_path / "self", tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores", "count"),
    [(None, 4, 4), (8.0, 4, 4), (4.0, 4, 4), (2.5, 4, 2), (2.6, 4, 3), (1.6, 4, 2), (1.5, 4, 1),
     (1.0, 4, 1), (0.1, 4, 1), (2.0, 1, 1)],
)  # fmt: skip
def test_a_quota_counts_as_so_many_cores(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int, count: int
) -> None:
    monkeypatch.setattr(affinity, "cpu_quota", lambda: quota)
    monkeypatch.setattr(affinity, "allowed_cores", lambda: list(range(cores)))
    assert affinity.core_count() == count
    assert (affinity.assign_cores().control is None) == (
        count == 1 or not hasattr(os, "sched_getaffinity")
    )


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from hetero.backends.host.affinity import core_count
from hetero.backends.opencl import every_core_count
from hetero.models import model_spec
from hetero.placement.choice import PlacementRequest
from hetero.placement.choosing import choose
assert (core_count(), every_core_count()) == (1, 1)
for model in ("llama-3.2-1b", "qwen2.5-0.5b"):
    found = choose(model_spec(model), PlacementRequest(mode="auto"))
    print(found.mode, found.plan, found.reason)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs affinity")
def test_a_process_on_one_core_gets_one_device() -> None:
    env = {**os.environ, "HETERO_SCALE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert line.startswith(("gpu None auto: gpu alone, ", "npu None auto: npu alone, "))
        assert line.endswith("two devices need two cores")


@pytest.mark.parametrize(
    ("files", "siblings", "polling", "gpu", "control"),
    [
        (GEN_3, {}, 6, 7, 4),  # polls on the slower A720s; computes on the X4 and an A720
        (X_ELITE, {}, 9, 10, 11),
        (HYBRID, {0: "0-1", 2: "2-3"}, 7, 0, 3),
        (FAVOURED, {2: "2-3"}, 7, 2, 7),  # hardware threads of one fast core are one core
        (FAVOURED, {2: "2,6"}, 7, 2, 3),
        ({}, {}, 7, 0, 7),  # a virtual machine
        ({"cpu_capacity": [1024] * 8}, {}, 7, 0, 7),
        ({"cpu_capacity": [500, 1024]}, {}, 7, 0, 7),  # not of all cores
    ],
)
def test_fast_cores_compute_and_a_middle_one_polls(
    files: dict[str, list[int]],
    siblings: dict[int, str],
    polling: int,
    gpu: int,
    control: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = {(core, name): str(x) for name, y in files.items() for core, x in enumerate(y)}
    written |= {(core, "topology/thread_siblings_list"): x for core, x in siblings.items()}
    for (core, name), text in written.items():
        path = tmp_path / f"cpu{core}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(affinity, "CPUS", tmp_path)
    count = max(8, *(len(x) for x in files.values()), 0)
    monkeypatch.setattr(affinity, "allowed_cores", lambda: list(range(count)))
    monkeypatch.setattr(affinity, "core_count", lambda: count)
    assert affinity.polling_core() == polling
    assert affinity.assign_cores() == affinity.CoreAssignment(gpu, control)
