"""What every command prints, in terminals of 60, 80 and 200 columns."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from hetero import plan
from hetero.cli.commands import COMMANDS

if sys.platform != "win32":
    from tests.support.terminals import Terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")

WIDTHS = (60, 80, 200)
NPU = ("--device", "npu")
PLAN = ("plan", "demo", "--profile", "snapdragon-8-gen-3")
SHOWN = {
    "generate": ("generate", "demo", "Once", *NPU, "--max-tokens", "2", "--stats"),
    "plan": (*PLAN, "--compare", "snapdragon-8-gen-3-strong-npu"),
    "plan --explain": (*PLAN, "--explain", "qkv"),
    "models": ("models",),
    "cache": ("cache",),
    "report": ("report", "plan.json", "--out", "plan.md"),
}  # fmt: skip
RECORDS = {
    "reproduce",
    "profile",
    "sync-bench",
    "bench",
    "eval",
    "doctor",
    "devices",
    "quantize",
}  # print what was measured
ELSEWHERE = {"chat", "serve", "serve-key", "compile", "warm"}  # print lines, no tables
# All commands in one process, whose terminal changes its width; those that measure print records.
CHILD = """
import fcntl, json, struct, sys, termios
from hetero.cli import app, tables
from hetero.cli import doctor, evaluate, profile
from hetero.compiling.precision import Precision, TypeChoice
from hetero.measuring.device_checks import Finding
from hetero.measuring.benchmark import BenchProcess, BenchReport, BenchRow
from hetero.measuring.evaluation import Evaluation
from hetero.measuring.reproduction import Claim, Reproduction
from hetero.measuring.sync_bench import SyncReport, WaitCost
from hetero.profiler.records import DeviceProfile

commands, widths = json.loads(sys.argv[1]), json.loads(sys.argv[2])
NAME = "A processor with a very long name, 64 cores, and what its driver says of itself"
wait = WaitCost(method="event", kernel_s=1e-3, added_median_s=1e-5, added_p95_s=2e-5, cpu_share=0.5)
waits = SyncReport(rows=(wait,), idle=(), flag=True, sleep_late_s=1e-5, sleep_cpu_s=1e-6,
                   environment={"cpu": NAME})
row = BenchRow(test="pp256", device="hetero", strategy="multi-sequence-cut", sync="fast",
               tokens_per_s_median=12345.6, tokens_per_s_min=1.0, tokens_per_s_max=123456.78)
bench = BenchReport(model="demo", rows=(row,), load_cold_s=1, load_warm_s=1, peak_rss_bytes=1,
                    environment={"cpu": NAME, "numbers": "measured"}, choices={"auto": NAME},
                    processes={"auto": BenchProcess(load_s=1, peak_rss_bytes=1, devices={})})
quality = Evaluation(tokens=400, perplexity=12.3456, perplexity_95=(11.1, 13.2), kl_p99=0.01,
                     top1_agreement=0.95, top1_agreement_95=(0.93, 0.97), kl_mean=1e-3,
                     kl_mean_95=(9e-4, 1.1e-3))
claim = Claim("e54-fs-decode InternLM-1.8B", "InternLM-1.8B, decode", "x", 2.2, 3.089, 0.1, NAME,
              3.1)
paper = Reproduction("snapdragon-8-gen-3", (claim,), (NAME * 3,), (NAME * 4,))
finding = Finding("opencl:pocl", "gpu", False, NAME, "install another driver, " + NAME)
written = TypeChoice("mixed (written)", {}, 123456789, 0.0123)
types = Precision([written], [TypeChoice("Q4_0", {}, 1, 1e-9)])
printed = {
    "quantize": lambda: tables.show_or_print(types.table(123456789)),
    "reproduce": lambda: tables.show_or_print(paper.table(), after=paper.remarks()),
    "profile": lambda: profile.print_summary(DeviceProfile.load("host")),
    "sync-bench": lambda: tables.show_or_print(waits.table(), waits.remarks()),
    "bench": lambda: tables.show_or_print(bench.table(), [bench.title], bench.remarks()),
    "eval": lambda: evaluate.print_qualities({"w8a8 15% (simulated)": quality}, False),
    "doctor": lambda: doctor.print_findings([finding], False, ("PASS", "FAIL")),
}

def run(words):
    try:
        app.main(words)
    except SystemExit as ended:
        return ended.code

for width in widths:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    for name, words in commands.items():
        if name == "generate" and width > min(widths):
            continue  # opens a model, and its table has two columns
        print(f"\\n=== {width} {name}", flush=True)
        code = run(words)
        print(f"\\n--- {code}", flush=True)
    for name, show in printed.items():
        print(f"\\n=== {width} {name}", flush=True)
        show()
        print("\\n--- 0", flush=True)
"""


def test_every_command_is_shown_or_has_a_reason() -> None:
    shown = {name.split()[0] for name in SHOWN}
    assert shown | RECORDS | ELSEWHERE == set(COMMANDS)


@pytest.mark.full
def test_tables_fit_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan("demo", "snapdragon-8-gen-3", seq_lens=(64,), curves=False).save(tmp_path / "plan.json")
    words = json.dumps(SHOWN), json.dumps(WIDTHS)
    with Terminal(*words, columns=80, program=(sys.executable, "-c", CHILD)) as terminal:
        assert terminal.end() == 0, terminal.text[-2000:]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text)
    parts = re.findall(r"=== (\d+) ([^\r\n]+)\r?\n(.*?)\n--- (\S+)", plain, flags=re.DOTALL)
    assert len(parts) == len(WIDTHS) * (len(SHOWN) + len(RECORDS) - 2) + 1, plain[-2000:]
    for width, name, text, code in parts:
        assert code in ("0", "None"), f"{name}: {text[-1000:]}"
        assert text.strip(), name
        for line in (x.rstrip("\r").split("\r")[-1] for x in text.split("\n")):
            assert cell_len(line) <= int(width), f"{name} at {width}: {line!r}"
            if set(line) & set("│┃┡└"):  # a row of a table is whole
                assert line.strip()[0] in "│┃┡┏└├", f"{name} at {width}: {line!r}"
                assert line.strip()[-1] in "│┃┩┓┘┤", f"{name} at {width}: {line!r}"
