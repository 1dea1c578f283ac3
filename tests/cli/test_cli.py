"""The command line as a user meets it: in a process of its own where that is the point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hetero.backends.opencl.reports import PREPARING
from hetero.models import model_spec
from hetero.solver.handmade import single_device
from tests.support.helpers import Command

GENERATE_KEYS = {
    "text",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "placement",
    "device",
    "gpu",
    "npu",
    "phases",
    "plan_id",
    "peak_rss_bytes",
    "weight_bytes",
    "copied_weight_bytes",
    "context_bytes",
}
BENCH_KEYS = {
    "model", "rows", "load_cold_s", "load_warm_s", "peak_rss_bytes", "environment", "choices",
    "processes",
}  # fmt: skip
ROW_KEYS = {
    "test",
    "device",
    "strategy",
    "sync",
    "tokens_per_s_median",
    "tokens_per_s_min",
    "tokens_per_s_max",
    "copied_bytes",
    "cores",
    "fastest",
    "devices",
    "depth",
}


def hetero(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hetero.cli.app", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **(env or {})},
    )


@pytest.mark.full
def test_generate_tells_a_story_from_two_processors() -> None:
    result = hetero(
        "generate", "demo", "Once upon a time", "--raw", "--max-tokens", "60", "--json",
        "--device", "hetero",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert set(answer) >= GENERATE_KEYS
    assert len(answer["text"].split()) > 20
    assert (answer["device"], answer["gpu"], answer["npu"]) == ("hetero", "opencl", "ort-cpu")
    assert set(answer["placement"]) == {"gpu", "npu"}
    assert all(share["ops"] > 0 and share["busy_s"] > 0 for share in answer["placement"].values())


@pytest.mark.full
def test_text_goes_to_stdout_and_stats_to_stderr(command: Command) -> None:
    plain = command(
        "generate", "demo", "One day", "--raw", "--max-tokens", "8", "--stats", "--device", "npu"
    )
    as_json = command(
        "generate", "demo", "One day", "--raw", "--max-tokens", "8", "--json", "--device", "npu"
    )
    assert plain.stdout.rstrip("\n") == json.loads(as_json.stdout)["text"].rstrip("\n")
    assert "decode" in plain.stderr
    assert "decode" not in plain.stdout


@pytest.mark.full
def test_without_opencl_the_npu_does_everything_and_says_so(tmp_path: Path) -> None:
    env = {"OCL_ICD_VENDORS": str(tmp_path / "none"), "OCL_ICD_FILENAMES": ""}
    result = hetero("generate", "demo", "One day", "--raw", "--max-tokens", "8", "--json", env=env)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert "gpu" not in answer["placement"]
    assert answer["placement"]["npu"]["ops"] > 0
    assert "opencl" in answer["placement"]["fallback"]
    assert result.stderr.count("warning") == 1
    assert (answer["device"], answer["gpu"]) == ("npu", None)


def without_cache(place: str, tmp_path: Path) -> dict[str, str]:
    return {"HOME": place, "XDG_CACHE_HOME": place, "TMPDIR": str(tmp_path)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/dev/null/cache", "Not a directory"),
        pytest.param("/proc/nope", "No such file or directory", marks=pytest.mark.exhaustive),
    ],
)
def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, place: str, why: str
) -> None:
    env = without_cache(place, tmp_path)
    words = ("generate", "demo", "One day", "--max-tokens", "4", "--json", "--device", "hetero")
    result = hetero(*words, env=env)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout.splitlines()[-1])["placement"]) == {"gpu", "npu"}
    assert "telemetry" not in result.stderr
    assert PREPARING in result.stderr
    assert f"kernels cannot be kept in {place}/hetero/opencl ({why})" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_devices_compute_below_a_home_that_is_no_folder(tmp_path: Path) -> None:
    result = hetero("doctor", env=without_cache("/dev/null/cache", tmp_path))
    assert result.returncode == 0, result.stdout
    progress, notice = result.stderr.splitlines()
    assert progress.endswith(PREPARING)
    assert "kernels cannot be kept in /dev/null/cache/hetero/opencl (Not a directory)" in notice
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_bench_shows_three_devices_side_by_side(command: Command) -> None:
    devices = ("--device", "gpu", "--device", "npu", "--device", "hetero")
    result = command("bench", "demo", *devices, "-p", "32", "-n", "4", "-r", "2", "-o", "json")
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert set(report) == BENCH_KEYS
    assert all(set(row) == ROW_KEYS for row in report["rows"])
    assert report["choices"]["gpu fast"] == "gpu alone, as asked for"
    assert report["choices"]["hetero fast"].startswith("hetero: tensor level (profile ")
    assert {(row["test"], row["device"]) for row in report["rows"]} == {
        (test, device) for test in ("pp32", "tg4") for device in ("gpu", "npu", "hetero")
    }
    for row in report["rows"]:
        alone = row["device"] if row["device"] != "hetero" else row["devices"]
        assert row["devices"] == alone
        assert row["cores"] == (1 if alone in ("gpu", "npu") else 2)
    shared = [x for x in report["rows"] if (x["test"], x["device"]) == ("pp32", "hetero")]
    assert [x["devices"] for x in shared] == ["tensor level"]
    for test in ("pp32", "tg4"):
        rows = [row for row in report["rows"] if row["test"] == test]
        (best,) = [row for row in rows if row["fastest"]]
        assert best["tokens_per_s_median"] == max(row["tokens_per_s_median"] for row in rows)
    assert all(
        0 < row["tokens_per_s_min"] <= row["tokens_per_s_median"] <= row["tokens_per_s_max"]
        for row in report["rows"]
    )


@pytest.mark.full
@pytest.mark.parametrize("form", ["md", "csv"])
def test_bench_writes_tables(command: Command, form: str) -> None:
    result = command(
        "bench", "demo", "-p", "8", "-n", "2", "-r", "1", "--device", "npu", "-o", form
    )
    assert result.returncode == 0, result.stderr
    assert "pp8" in result.stdout
    assert "tg2" in result.stdout


@pytest.mark.full
def test_quantize_then_generate_gives_the_same_text(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "small"
    made = command("quantize", "demo", "--out", str(out))
    assert made.returncode == 0, made.stderr
    texts = [
        command(
            "generate", model, "One day", "--raw", "--max-tokens", "12", "--device", "npu"
        ).stdout
        for model in ("demo", str(out))
    ]
    assert texts[0] == texts[1]
    eight = tmp_path / "eight"
    assert command("quantize", "demo", "--out", str(eight), "--weights", "w8a16").returncode == 0
    own = command(
        "generate", str(eight), "One day", "--raw", "--max-tokens", "12", "--device", "npu"
    )
    assert (own.returncode, own.stdout) == (0, texts[0]), own.stderr  # what it holds is the default
    wrong = command("generate", str(eight), "One day", "--weights", "w4a16")
    assert "use --weights w8a16" in wrong.stderr
    again = command("quantize", "demo", "--out", str(tmp_path))
    assert again.returncode == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eight", "small"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "nowhere", "hi"), "'nowhere': there is no such directory"),
        (("generate", "demo", ""), "the prompt is empty"),
        (("generate", "demo", "hi", "--top-p", "0"), "top_p must be in (0, 1]"),
        (("generate", "demo", "hi", "--gpu", "opencll"), "did you mean 'opencl'?"),
        (("generate", "demo", "hi", "--npu", "opencl"), "opencl is not a npu backend"),
        (("generate", "demo", "hi", "--max-seq-len", "999999"), "max_seq_len must be in"),
        (("generate", "demo", "word " * 3000), "do not fit the context"),
        (("generate", "demo", "hi", "--plan", "/nope.json"), "cannot read the plan"),
        (("generate", "demo", "hi", "--weights", "w5"), "Invalid value"),
        (("generate", "demo", "hi", "--logprobs", "2"), "add --json"),
        (("quantize", "demo", "--out", "/proc/nope"), "/proc/nope"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence(
    command: Command, arguments: tuple[str, ...], sentence: str
) -> None:
    result = command(*arguments)
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.full
def test_debug_shows_the_traceback() -> None:
    result = hetero("--debug", "generate", "nowhere", "hi")
    assert "Traceback" in result.stderr


def test_doctor_passes_and_devices_lists(command: Command) -> None:
    checked = command("doctor", "--json")
    assert checked.returncode == 0, checked.stdout
    found = {finding["name"]: finding["ok"] for finding in json.loads(checked.stdout)}
    assert all(found.values())
    assert {"opencl", "ort-cpu"} < set(found)
    assert "ort-cpu" in command("devices").stdout


@pytest.mark.full
def test_doctor_fails_with_a_remedy(tmp_path: Path) -> None:
    result = hetero("doctor", env={"OCL_ICD_VENDORS": str(tmp_path / "none")})
    assert result.returncode == 1
    assert "FAIL" in result.stdout
    assert "remedy:" in result.stdout
    assert "PASS" in result.stdout


def interruptible(command: list[str]) -> subprocess.Popen[Any]:
    """A process that takes Ctrl-C even where these tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.full
def test_ctrl_c_ends_with_130() -> None:
    command = [sys.executable, "-m", "hetero.cli.app", "generate", "demo", "One day"]
    process = interruptible(
        [*command, "--max-tokens", "400", "--temperature", "2", "--seed", "1", "--raw"]
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("module", ["hetero.backends", "hetero.models", "hetero.runtime"])
def test_ctrl_c_while_the_imports_run_ends_with_130(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hetero.start", "generate", "demo", "hi"]
    process = interruptible(command)
    assert process.stderr is not None
    # The handler stands by the time that hetero's first modules are imported.
    assert any(module.encode() in line for line in iter(process.stderr.readline, b""))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors[-2000:]
    assert b"Traceback" not in errors
    assert b"interrupted" in errors


@pytest.mark.full
def test_chat_answers_in_turn(command: Command) -> None:
    result = command(
        "chat", "demo", "--max-tokens", "12", "--seed", "1",
        stdin="Tell me a story.\nAnd then?\n\n",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.strip()]) >= 2


def test_version_needs_no_command(command: Command) -> None:
    result = command("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == version("hetero")


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "demo", "One day", "--device", "npu"),
        ("plan", "llama-3-8b", "--profile", "host", "--explain", "qkv"),
        ("--help",),
    ],
    ids=lambda words: words[0],
)
def test_a_reader_that_goes_away_is_no_error(words: tuple[str, ...]) -> None:
    process: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, "-m", "hetero.start", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if words[0] == "generate":
        process.stdout.read(1)
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (0, b"")
    process.stderr.close()


@pytest.mark.full
def test_the_users_own_broken_pocl_cache_is_named() -> None:
    env = {"POCL_CACHE_DIR": "/proc/nope"}
    result = hetero("generate", "demo", "hi", "--max-tokens", "1", env=env)
    assert result.returncode == 2
    assert "POCL_CACHE_DIR=/proc/nope cannot be written; unset it or name" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("env", "gpu", "said"),
    [
        (
            {"HETERO_OPENCL_LEVEL": "avx51"},
            "opencl",
            "did you mean 'avx512'? known are avx512-vnni",
        ),
        ({}, "opencl:nosuch", "looking for 'nosuch' failed: not found; there is: "),
        ({}, "opencl:", "names no driver: write it like opencl:pocl"),
        ({}, "reference:x", "only opencl and opencl-cores take a driver"),
    ],
)
def test_a_level_or_driver_that_is_not_there_is_one_sentence(
    env: dict[str, str], gpu: str, said: str
) -> None:
    result = hetero("generate", "demo", "hi", "--max-tokens", "1", "--gpu", gpu, env=env)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_plan_and_another_device_contradict_each_other(command: Command, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    single_device(model_spec("demo"), "gpu").save(plan)
    result = command("generate", "demo", "hi", "--plan", str(plan), "--device", "npu")
    assert result.returncode == 2
    assert "leave out the device" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize("weights", ["f32", "f16", "w8a16"])
def test_the_demo_serves_every_format(command: Command, weights: str) -> None:
    common = ("generate", "demo", "One day", "--raw", "--max-tokens", "10", "--device", "npu")
    results = [command(*common, "--weights", x) for x in (weights, "w4a16")]
    assert results[0].returncode == 0, results[0].stderr
    assert results[0].stdout == results[1].stdout


def test_penalties_biases_echo_and_log_probabilities(command: Command) -> None:
    common = (
        "generate",
        "demo",
        "One day",
        "--raw",
        "--max-tokens",
        "6",
        "--device",
        "npu",
        "--json",
    )
    plain = json.loads(command(*common).stdout)
    assert "logprobs" not in plain
    both = command(*common, "--echo", "--logprobs", "2", "--logit-bias", "14=-100",
                  "--frequency-penalty", "0.5", "--presence-penalty", "0.5")  # fmt: skip
    found = json.loads(both.stdout)
    assert found["text"].startswith("One day")
    assert [len(x["top"]) for x in found["logprobs"]] == [2] * 6
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"] - 1
    assert all(x["token"] != 14 for x in found["logprobs"])
    wrong = command(*common, "--logit-bias", "comma")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--logit-bias must be a token id and a number" in wrong.stderr


@pytest.mark.full
def test_chat_goes_on_when_its_context_is_full_and_from_its_session(
    command: Command, tmp_path: Path
) -> None:
    words = ("chat", "demo", "--device", "npu", "--seed", "1", "--max-seq-len", "64")
    words += ("--max-tokens", "24", "--session", str(tmp_path / "s"))
    for lines in ("Tell me a story.\n" * 4 + "\n", "And then?\n" + "long " * 80 + "\nMore?\n\n"):
        result = command(*words, stdin=lines)
        assert result.returncode == 0, result.stderr
        assert "the oldest messages are left out" in result.stderr
    assert "the message has" in result.stderr
    assert len([line for line in result.stdout.splitlines() if line.strip()]) >= 2


@pytest.mark.full
def test_bench_says_what_to_make_smaller(command: Command) -> None:
    result = command("bench", "demo", "-p", "512", "-r", "1", "--device", "npu")
    assert result.returncode == 2
    assert "choose a smaller -p or -n" in result.stderr


def test_without_a_command_the_help_is_all(command: Command) -> None:
    result = command()
    assert (result.returncode, result.stderr) == (2, "")
    assert "Usage" in result.stdout


@pytest.mark.full
def test_an_error_is_the_only_line_on_stderr() -> None:
    assert len(hetero("quantize", "demo", "--out", __file__).stderr.splitlines()) == 1


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence() -> None:
    command = "exec hetero generate demo hi --max-tokens 2 > /dev/full".replace(
        "hetero", f"'{sys.executable}' -m hetero.cli.app"
    )
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr


def test_text_outside_the_terminals_code_page_is_replaced() -> None:
    env = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    code = (
        "from hetero.cli.app import app, main\n"
        "app.command('say')(lambda: print('é'))\nmain(['say'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, env={**os.environ, **env}
    )
    assert (result.returncode, result.stdout.strip()) == (0, b"?"), result.stderr


@pytest.mark.full
def test_chat_without_stdin_ends() -> None:
    command = f"exec '{sys.executable}' -m hetero.cli.app chat demo --device npu <&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
