"""The benches run in their smallest size, and every command of RESULTS.md is one of theirs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.gguf_files import write_tiny

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
SAMPLES = ROOT / "docs/demo-model/samples.md"
TEXTS = "--text TEXT --calibrate TEXT --calibration-tokens 64"
DEMO = "--model demo --weights w4a16"
BRIEFLY = {
    f"peers.py levels --profile host {DEMO} -p 16 -n 2 -r 1": "of ideal",
    "predictions.py accuracy --again --profile host --rows ROWS": "decision regret",
    "predictions.py small demo --profile host -p 4 -n 2 -r 1": "auto reaches",
    "predictions.py phases demo --profile host -p 4 -n 2 -r 1": "| step |",
    "predictions.py hand-over --model demo --weights f32 -p 8 -n 8 -r 1": "| yes |",
    "-m tests.profiler.ablation --profile host --rows start": "| host | start | ridge |",
    "kernels.py ceiling --mib 8 --seconds 0.02 -r 1": "both over the better one",
    "kernels.py matmul --formats w4a16 --tokens 1 --shapes 64x64 -r 1 --streamed-mb 1": "| 64x64 |",
    "kernels.py split -m 8 -r 1": "| down | 8 |",
    "kernels.py chains --model demo --gpu opencl -p 4 -n 2 -r 1": "x as fast",
    "kernels.py lengths --gpu opencl -p 4 -n 1 -r 1": "| 4 |",
    "kernels.py rows --counts 1,2 -p 4 -n 2 -r 1": "| 2 |",
    "kernels.py growth --model demo --gpu opencl --contexts 8,32,64 -n 2 -r 1": "decode grows by",
    "kernels.py unused-device -p 4 -n 2 -r 1": "speed of hetero over gpu",
    "kernels.py memory-models demo -p 4 -n 2 -r 1": "| step | copied |",
    "contenders.py demo --devices npu -p 4 -n 2 --rounds 1": "| npu |",
    f"control_plane.py --profile host {DEMO} -n 1": "| tensor level |",
    f"mllm_npu.py order {DEMO} -p 80 --chunk 32 --rounds 1": "| best |",
    "mllm_npu.py simulated -p 300": "| + order |",
    "mllm_npu.py chunks -p 100": "| 256 |",
    "mllm_npu.py energy --models qwen1.5-1.8b -p 64": "| qwen1.5-1.8b | 64 |",
    "mllm_npu.py memory --models qwen1.5-1.8b": "| qwen1.5-1.8b | ours |",
    "mllm_npu.py pruning -p 64": "| 85% |",
    "mllm_npu.py drift --chunk 32 --layers 2 --noise 0.1 --slower 1 --draws 2": "| known times |",
    "clients.py demo --only open-webui": "nothing fails",
    "paper.py game --prompts 1": "| PPL-OpenCL |",
    "paper.py graph-life --shapes 64x64 -m 32": "| 64x64 | 32 |",
    "speculation.py demo --draft-model demo -n 8 -r 1": "| plain | 8 |",
    "drafts.py trees demo -n 20": "| code edited, greedy | 20 |",
    "drafts.py devices --profiles snapdragon-8-gen-3 --rates 0.8": "| snapdragon-8-gen-3 | 0.8 |",
    "starts.py demo --later 1 -n 2": "| later |",
    "peak.py GGUF --device npu --context 32": "| tiny.gguf | later |",
    "paper.py fit --check": "files are up to date",
    "chips.py --check": "files are up to date",
    "chip_errors.py": "fastest named, %",
    "three_devices.py --model qwen3-0.6b -m 64": "| ideal of three |",
    "paper.py limits --models llama-3.2-1b -p 64": "| llama-3.2-1b | weights once, one domain |",
    "paper.py orders --shapes 64x64 -m 32": "| 64 × 64 | 32 | input |",
    "ablations.py decode demo -n 1 -r 2": "| signals |",
    "quality.py kept demo --text TEXT --bits 8 --bits mixed --seeds 2 --window 64": "| 8 | 1.000 |",
    f"quality.py forms demo {TEXTS} -s naive --max-tokens 40": "| naive | 39 |",
    f"quality.py outliers demo {TEXTS} -s none --tokens 40": "| none |",
    f"quality.py excess demo {TEXTS} --tokens 40": "| down |",
    "contexts.py figures 14 --hours 1": "| 16 |",
    "contexts.py planning -r 3": "| 256 |",
    "contexts.py restoring --models llama-3.2-1b --profiles host --lengths 256": "| 256 |",
    "contexts.py figures 2": "| one context",
    "contexts.py measure -n 8 -c 2 --disk 100e6 --part 0.125 --answer 4": "| hetero |",
    "serving.py demo -n 20 -r 1": "| parser / decode, % |",
    "bundles.py demo --graph-sizes 32 --lengths 3 --starts 1 -n 2": "| yes |",
    "paper_reproduction.py": "Order of strategies",
    "before_after.py --rounds 1 HEAD paper_reproduction.py": "| 1.000 |",
    "house.py": "| functions that assign `found` | 0 |",
    "-m tests.support.robustness soak --minutes 0.01": "| yes |",
    "-m tests.support.robustness prompts --count 1": "| online-prepare | 1 | 0 |",
}
GROWS = "tests.support.robustness soak"  # in its first second, which is what its exit code tells
# Parses every command line with the callbacks of all commands taken out.
PARSE = """
import importlib, json, sys
import typer
sys.path.insert(0, "bench")

def muted(command):
    command.callback = lambda **_: None
    for inner in getattr(command, "commands", {}).values():
        muted(inner)
    return command

for name, *arguments in json.loads(sys.argv[1]):
    app = importlib.import_module(name).app
    muted(typer.main.get_command(app)).main(arguments, standalone_mode=False)
    print("parsed", name, *arguments)
"""


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that a profile has measured on both devices, as held-out ones."""
    profile = json.loads((ROOT / "profiler/profiles/host.json").read_text(encoding="utf-8"))
    chosen = [x for x in profile["matmuls"] if x["weight_format"] == "w4a16"][::5]
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize("command", BRIEFLY)
def test_a_bench_runs(command: str, rows: Path, tmp_path: Path) -> None:
    files = {"ROWS": str(rows), "TEXT": str(SAMPLES), "GGUF": str(tmp_path / "tiny.gguf")}
    if "GGUF" in command:
        write_tiny(tmp_path / "tiny.gguf")
    name, *options = [files.get(word, word) for word in command.split()]
    done = run([name if name == "-m" else str(BENCH / name), *options])
    assert done.returncode == 0 or GROWS in command, done.stdout[-500:] + done.stderr[-2000:]
    assert BRIEFLY[command] in done.stdout, done.stdout[-1500:] + done.stderr[-2000:]


def commands() -> list[list[str]]:
    """Module and arguments of every command of the documents that starts a bench."""
    found = []
    for page in (*sorted(BENCH.rglob("RE*.md")), *(ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"python bench/([^`\n]+)", text):
            name, *arguments = shlex.split(line)
            found.append([name.removesuffix(".py"), *arguments])
    return found


@pytest.mark.full
def test_every_command_of_the_results_parses() -> None:
    told = commands()
    old = [
        "tensor_level --profile host --weights w4a8 -p 256 -n 32 -r 5 --choices auto",
        "control_plane --model random:llama-3.2-1b --weights w4a8 -n 32 --profile host",
        "paper_reproduction --json x --profile snapdragon-8-gen-3",
    ]
    told += [line.split() for line in old] + [["peers"]]
    assert {name for name, *_ in told} >= {"peers", "predictions", "kernels", "paper", "mllm_npu"}
    done = run(["-c", PARSE, json.dumps(told)])
    assert done.stdout.count("parsed") == len(told), done.stdout[-500:] + done.stderr[-2000:]


def test_the_results_and_the_log_are_short() -> None:
    assert (BENCH / "RESULTS.md").read_text(encoding="utf-8").count("\n") <= 150
    assert (BENCH / "LOG.md").read_text(encoding="utf-8").count("\n") <= 400
