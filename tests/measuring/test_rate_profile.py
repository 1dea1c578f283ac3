"""Profiles from benchmarks of whole models: llama-bench's files and the published table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hetero
from hetero.backends.snapdragon import chip_named
from hetero.cli.app import app
from hetero.errors import UserError
from hetero.measuring.rate_files import Source, read_rates, work_of
from hetero.measuring.rate_profile import profile_of_rates
from hetero.profiler.fitted_units import Rate, UnitRates, predicted, rates_of, stack_of

MODELS = {
    "Qwen3-0.6B-Q4_0.gguf": "qwen3 0.6B Q4_0",
    "Llama-3.2-1B-Instruct-Q4_0.gguf": "llama 1B Q4_0",
    "models/qwen3-4b-q4_0.gguf": "qwen3 4B Q4_0",
}
CHIP = "Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU"
UNITS = {
    "npu": ("HTP0", 99, UnitRates(4e10, 8e12, 1e12, 1e10, 3e-5, 1e12, 1e-5)),
    "gpu": ("GPUOpenCL", 99, UnitRates(6e10, 2e12, 1e11, 2e10, 2e-5, 1e12, 1e-5)),
    "cpu": ("none", 0, UnitRates(8e10, 1e12, 2e11, 5e9, 2e-6, 1e12, 1e-5)),
}
TESTS = ((512, 0, 0), (2048, 0, 0), (0, 128, 0), (0, 128, 4096), (256, 0, 4096))
ROWS = Path(__file__).parents[2] / "bench" / "data" / "published_llm_rates.csv"


def bench(models: Iterable[str] = MODELS, units: Iterable[str] = UNITS) -> list[dict[str, Any]]:
    """Rows as llama-bench prints them, of a chip of three such processors."""
    return [row_of(model, unit, *test) for model in models for unit in units for test in TESTS]


def row_of(model: str, unit: str, prompt: int, answer: int, depth: int) -> dict[str, Any]:
    device, layers, rates = UNITS[unit]
    phase = "prefill" if prompt else "decode"
    at = depth if prompt else depth + answer // 2
    rate = Rate(work_of(model), phase, prompt or 1, at, 1.0)
    return {
        "build_commit": "6a8cf8914", "cpu_info": CHIP, "gpu_info": "Adreno", "devices": device,
        "backends": "OpenCL,HTP", "model_filename": model, "model_type": MODELS[model],
        "n_gpu_layers": layers, "n_prompt": prompt, "n_gen": answer, "n_depth": depth,
        "avg_ts": predicted(rates, stack_of("llama.cpp"), rate),
    }  # fmt: skip


def written(path: Path, rows: Iterable[Any], *, lines: bool = False) -> Path:
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(list(rows))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize("lines", [False, True])
def test_a_chip_is_fitted_to_what_llama_bench_printed(tmp_path: Path, lines: bool) -> None:
    taken = profile_of_rates(written(tmp_path / "phone.json", bench(), lines=lines)).profile
    assert (taken.name, taken.numbers, set(taken.devices)) == (
        "sc8380xp",
        "fitted",
        {"gpu", "npu", "cpu"},
    )
    assert [x.device for x in taken.units] == ["gpu", "npu", "cpu"]
    for unit in taken.units:
        fitted, stack = rates_of(unit)
        for model in MODELS:
            for prompt, answer, depth in TESTS:
                row = row_of(model, unit.device, prompt, answer, depth)
                rate = Rate(
                    work_of(model), "prefill" if prompt else "decode", prompt or 1,
                    depth if prompt else depth + answer // 2, row["avg_ts"],
                )  # fmt: skip
                assert predicted(fitted, stack, rate) == pytest.approx(row["avg_ts"], rel=0.05)
        assert all(x.folds == len(MODELS) and x.mape < 0.2 for x in unit.validation)


@pytest.mark.full
def test_the_profile_plans_and_answers(tmp_path: Path) -> None:
    taken = profile_of_rates(written(tmp_path / "a.json", bench())).profile
    plan = hetero.plan("llama-3-8b", taken, seq_lens=(256,), curves=False, fastest=True)
    assert plan.numbers == "fitted"
    assert "npu" in plan.fastest[0].devices
    assert ("cpu",) in {x.devices for x in plan.fastest[0].candidates}


@pytest.mark.full
@pytest.mark.parametrize("unit", ["npu", "gpu"])
def test_one_model_on_one_device_is_a_profile_without_a_check(tmp_path: Path, unit: str) -> None:
    rows = bench(["Qwen3-0.6B-Q4_0.gguf"], [unit])
    taken = profile_of_rates(written(tmp_path / "a.json", rows)).profile
    assert set(taken.devices) == {unit}
    assert taken.units[0].validation == ()
    plan = hetero.plan("qwen3-4b", taken, seq_lens=(256,), curves=False, fastest=True)
    assert {x.devices for x in plan.fastest} == {(unit,)}


@pytest.mark.full
def test_rows_of_no_one_processor_are_skipped_and_named(tmp_path: Path) -> None:
    others = [
        row_of("Qwen3-0.6B-Q4_0.gguf", "npu", 512, 0, 0) | change
        for change in (
            {"n_gen": 128},
            {"model_type": "qwen3 0.6B Q8_0"},
            {"devices": "HTP0/GPUOpenCL"},
            {"model_filename": "secret.gguf", "model_type": "unheard 7B Q4_0"},
        )
    ]
    notes = profile_of_rates(written(tmp_path / "a.json", bench() + others)).notes
    assert len(notes) == 4
    assert all(note.startswith("1 rows were skipped: ") for note in notes)


def test_a_unit_is_named_by_its_devices_else_by_what_the_program_has(tmp_path: Path) -> None:
    for backends, layers, unit in (("HTP", 99, "npu"), ("Vulkan", 99, "gpu"), ("CPU", 99, "cpu"),
                                   ("OpenCL,HTP", 0, "cpu")):  # fmt: skip
        row = row_of("Qwen3-0.6B-Q4_0.gguf", "npu", 512, 0, 0)
        row |= {"devices": "auto", "backends": backends, "n_gpu_layers": layers}
        rates = read_rates(written(tmp_path / "a.json", [row])).rates
        assert list(rates) == [Source(CHIP, "llama.cpp", unit)]


@pytest.mark.full
def test_the_published_table_is_fitted_chip_by_chip() -> None:
    taken = profile_of_rates(ROWS, "x-elite").profile
    assert {(x.device, x.engine) for x in taken.units} == {
        ("gpu", "llama.cpp"), ("npu", "qairt"), ("npu", "llama.cpp"), ("cpu", "llama.cpp"),
    }  # fmt: skip
    with pytest.raises(
        UserError, match=r"has rates of 6 chips \(.*x2-elite\): name one with --soc"
    ):
        profile_of_rates(ROWS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (CHIP, "sc8380xp"),
        ("Snapdragon(R) X2 Elite - X2E80100", "sc8480xp"),
        ("galaxy-s26 (8 Elite Gen 5)", "sm8850"),
        ("galaxy-s25 (8 Elite)", "sm8750"),
        ("Snapdragon 8+ Gen 1", "sm8475"),
        ("qcom,sm8650-mtp qcom,sm8650", "sm8650"),
        ("iq-9075", "qcs9075"),
        ("AMD Ryzen 7", None),
        ("", None),
    ],
)
def test_a_chip_is_known_by_its_number_or_title(text: str, name: str | None) -> None:
    chip = chip_named(text)
    assert (chip.name if chip else None) == name


def change(**fields: Any) -> Callable[[], list[Any]]:
    return lambda: [row_of("Qwen3-0.6B-Q4_0.gguf", "npu", 512, 0, 0) | fields]


ABSURD: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "no rows": (list, "has no row to fit (it is empty)"),
    "no objects": (lambda: [1, 2], "is no list of benchmarks"),
    "a rate of 0": (change(avg_ts=0), "row 1 of {}: 0.0 tokens/s is no speed"),
    "a negative rate": (change(avg_ts=-3), "-3.0 tokens/s is no speed"),
    "no number": (change(avg_ts="fast"), "row 1 of {}: could not convert"),
    "not a number": (change(avg_ts=float("nan")), "nan tokens/s is no speed"),
    "faster than any chip": (change(avg_ts=1e9), "in prefill is more than a chip does"),
    "faster than any memory": (
        change(avg_ts=1e5, n_prompt=0, n_gen=64), "in decode is more than a chip does"),
    "a depth below 0": (change(n_depth=-9), "n_depth is -9"),
    "a prompt of 10^9": (change(n_prompt=10**9), "n_prompt is 1000000000"),
    "no model": (change(model_type="unheard 7B Q4_0", model_filename="x.gguf"),
                 "has no row to fit (1 of the unknown model x.gguf)"),
    "another tool": (lambda: [{"tool": "x"}], "row 1 of {}: no 'avg_ts'"),
    "prompts alone": (change(), "has no rate of answers (-n) on the NPU"),
    "answers alone": (
        change(n_prompt=0, n_gen=9, avg_ts=50), "has no rate of prompts (-p) on the NPU"),
    "the CPU alone": (lambda: bench(units=["cpu"]), "has rates of the CPU only"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSURD)
def test_a_file_that_cannot_be_fitted_is_one_sentence(name: str, tmp_path: Path) -> None:
    rows, sentence = ABSURD[name]
    path = written(tmp_path / "a.json", rows())
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["profile", "--from", str(path), "--out", str(out)])
    assert isinstance(done.exception, UserError)
    assert sentence.format(path) in str(done.exception)
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no column 'model'"),
        ("[{", "is not JSON"),
        ("{]}", "is not JSON"),
        ("model,chip\nx,y\n", "has no column 'engine'"),
    ],
)
def test_a_file_of_another_form_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        read_rates(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("unit", "tpu", "unit 'tpu' is none of cpu, gpu, npu"),
        ("engine", "vllm", "engine 'vllm' is none of llama.cpp, qairt"),
        ("context", "-5", "context is -5"),
        ("decode_tokens_per_s", "1e9", "in decode is more than a chip does"),
    ],
)
def test_a_damaged_table_names_its_row(
    field: str, value: str, sentence: str, tmp_path: Path
) -> None:
    with ROWS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:5]
    rows[2] |= {field: value}
    path = tmp_path / "table.csv"
    with path.open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(UserError, match=f"row 3 of .*{sentence}"):
        read_rates(path)


@pytest.mark.full
def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    path, out = written(tmp_path / "a.json", bench()), tmp_path / "chip.json"
    words = ["profile", "--from", str(path), "--out", str(out)]
    done = CliRunner().invoke(app, [*words, "--json"])
    document = json.loads(done.stdout)
    assert (document["out"], document["name"]) == (str(out), "sc8380xp")
    assert hetero.DeviceProfile.load(out).fingerprint == document["fingerprint"]
    refused = CliRunner().invoke(app, [*words, "--quick"])
    assert "--from measures nothing: leave out --quick" in str(refused.exception)
