"""Profiles as documents: round trips, damage, versions, foreign devices."""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hetero.backends import null
from hetero.backends.registry import EVERY_CORE
from hetero.profiler import profile_files
from hetero.profiler.errors import ProfileError, ProfileWarning
from hetero.profiler.records import (
    Bandwidth,
    DeviceProfile,
    DeviceRecord,
    Knots,
    MatMulPredictor,
    MatMulRow,
    Quarantine,
    ShapeRange,
    Tree,
)
from tests.profiler.fakes import W4, knots, record, row
from tests.support.selection import examples

finite = st.floats(1e-9, 1e3, allow_nan=False, allow_infinity=False)
count = st.integers(1, 1 << 20)
rows = st.builds(
    MatMulRow,
    device=st.sampled_from(["gpu", "npu"]),
    weight_format=st.just(W4),
    m=count,
    n=count,
    k=count,
    seconds=finite,
    ci=st.none() | st.floats(0, 2),
    samples=count,
    flags=st.lists(st.sampled_from(["drifted", "disturbed"]), max_size=2).map(tuple),
)
quarantines = st.builds(
    Quarantine,
    device=st.just("gpu"),
    op=st.text(max_size=8),
    error=st.none() | finite,
    tolerance=finite,
    detail=st.text(max_size=30),
)


def small_profile(**changes: Any) -> DeviceProfile:
    predictor = MatMulPredictor(
        device="gpu",
        weight_format=W4,
        knots=knots((1, 1e-10), (256, 1e-8)),
        measured=ShapeRange(m=(1, 256), n=(64, 4096), k=(64, 4096)),
    )
    values: dict[str, Any] = {
        "name": "test", "created": "2026-01-01", "hetero_version": "0",
        "devices": {"gpu": record("gpu")}, "predictors": (predictor,),
        "matmuls": (row("gpu", 1, 64, 64, 1e-3),),
    }  # fmt: skip
    return DeviceProfile(**(values | changes))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rows, max_size=5), st.lists(quarantines, max_size=3), st.text(max_size=20))
def test_a_profile_survives_its_file(
    matmuls: list[MatMulRow], bad: list[Quarantine], name: str
) -> None:
    profile = small_profile(matmuls=tuple(matmuls), quarantined=tuple(bad), name=name)
    again = DeviceProfile.model_validate(json.loads(profile.to_json()))
    assert again == profile
    assert again.fingerprint == profile.fingerprint


def test_saving_and_loading_keeps_every_digit(tmp_path: Path) -> None:
    profile = small_profile(bandwidth=Bandwidth(gpu_alone_bytes_per_s=1.1e10 / 3))
    profile.save(tmp_path / "p.json")
    assert DeviceProfile.load(tmp_path / "p.json") == profile
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json"]


def test_a_row_is_one_line_of_the_file() -> None:
    lines = small_profile().to_json().splitlines()
    assert sum('"seconds": 0.001' in line and '"n": 64' in line for line in lines) == 1
    assert max(map(len, lines)) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1, 2]", "is not a profile"),
        ("{}", "is not a profile"),
        ("[" * 100_000, "is not JSON"),
        ('{"schema_version": 1}', "is damaged at name"),
        ('{"schema_version": 99}', "has schema version 99, this hetero reads 1: update hetero"),
        ('{"schema_version": 0}', "has schema version 0, this hetero reads 1: take it again"),
        ('{"schema_version": true}', "has schema version True"),
        ('{"schema_version": "1"}', "has schema version '1'"),
    ],
)
def test_what_is_not_a_profile_is_refused_in_a_sentence(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as found:
        DeviceProfile.load(path)
    assert "\n" not in str(found.value)


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot be read .* take one with `hetero profile`"):
        DeviceProfile.load(tmp_path / "none.json")


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_load_or_are_refused_but_never_crash(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(small_profile().to_json().encode())
    for _ in range(rng.randint(1, 8)):
        kind = rng.randint(0, 2)
        at = rng.randrange(len(data))
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 40)]
        else:
            data[at:at] = rng.choice([b"NaN", b"-1", b"{}", b"null", b"1e999", b'"'])
    path = tmp_path / "p.json"
    path.write_bytes(bytes(data))
    with contextlib.suppress(ProfileError):
        DeviceProfile.load(path)


@pytest.mark.parametrize("key", ["name", "created", "hetero_version", "devices"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    document = small_profile().model_dump(mode="json")
    del document[key]
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=f"is damaged at {key} "):
        DeviceProfile.load(tmp_path / "p.json")


def test_old_versions_migrate_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_zero(document: profile_files.Document) -> profile_files.Document:
        return {**document, "schema_version": 1, "name": document["name"].upper()}

    monkeypatch.setitem(profile_files.MIGRATIONS, 0, from_zero)
    path = tmp_path / "old.json"
    path.write_text(json.dumps(small_profile().model_dump(mode="json") | {"schema_version": 0}))
    assert DeviceProfile.load(path).name == "TEST"


def test_infinity_and_nan_have_no_place() -> None:
    with pytest.raises(ValidationError):
        row("gpu", 1, 1, 1, float("nan"))
    with pytest.raises(ValidationError):
        row("gpu", 1, 1, 1, float("inf"))


@pytest.mark.parametrize(
    ("tokens", "coefficients"),
    [((), ()), ((1, 2), ((0.0, 0, 0, 1),)), ((2, 1), ((0.0, 0, 0, 1),) * 2)],
)
def test_knots_must_rise_and_agree(tokens: Any, coefficients: Any) -> None:
    with pytest.raises(ValidationError):
        Knots(tokens=tokens, coefficients=coefficients)


def test_a_tree_that_points_backwards_is_refused() -> None:
    with pytest.raises(ValidationError, match="must point forward"):
        Tree(feature=(0, -1), threshold=(0, 0), left=(0, 0), right=(1, 0), value=(0, 1))


def test_a_profile_of_other_devices_warns_and_its_own_does_not() -> None:
    gpu = null.open(kind="gpu")
    own = small_profile(devices={"gpu": DeviceRecord.of(gpu)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.warn_if_foreign([gpu])
    with pytest.warns(ProfileWarning, match=r"was taken elsewhere .*its gpu is gpu"):
        small_profile().warn_if_foreign([gpu])
    with pytest.warns(ProfileWarning, match="it has no npu"):
        own.warn_if_foreign([gpu, null.open(kind="npu")])


def test_every_core_of_a_measured_device_is_no_other_machine() -> None:
    gpu: Any = null.open(kind="gpu")
    own = small_profile(devices={"gpu": DeviceRecord.of(gpu)})
    every = replace(gpu.info, backend=EVERY_CORE, details={"threads": "2"})
    for info, same in ((every, True), (replace(every, driver="another"), False)):
        device: Any = SimpleNamespace(capabilities=gpu.capabilities, info=info)
        assert bool(own.differences([device])) is not same


def test_an_unwritable_place_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="choose another --out"):
        small_profile().save(tmp_path / "file" / "p.json")


def test_shipped_profiles_load_by_name() -> None:
    for name in profile_files.shipped_names():
        assert DeviceProfile.load(name).predictors
