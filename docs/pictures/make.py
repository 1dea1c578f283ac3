"""Makes the pictures of README: `python docs/pictures/make.py`, with Chromium and hetero installed.

`plan.png` is the top of a plan's report in a browser, `trace.png` two layers of a prompt in a trace
of `--device hetero` on this machine, its lanes as a viewer of traces shows them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import hetero
from hetero.profiler.pages import COLORS

HERE = Path(__file__).resolve().parent
SIZE = "1180,1010"
SHOWN = ("layer10.", "layer11.")
KINDS = {"GPU": "gpu", "NPU": "npu"}
WARM_UP = 8  # prompts
LABELLED = 0.04  # of the picture's width: narrower bars have no room for a name


def plan_picture(work: Path) -> None:
    """A screenshot of a report."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium here: the picture of a plan is a screenshot of its report")
    page = work / "plan.html"
    hetero.plan("llama-3-8b", "snapdragon-8-gen-3", seq_lens=(256, 1024)).report(page)
    subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--window-size={SIZE}", f"--screenshot={HERE / 'plan.png'}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def trace_picture(work: Path) -> None:
    """Lanes of two layers of a prompt, when what is known of the devices has settled."""
    path, prompt = work / "trace.json", list(range(256))
    with hetero.LLM("random:qwen2.5-0.5b", device="hetero", max_seq_len=300) as llm:
        for _ in range(WARM_UP):
            llm.generate(prompt, max_tokens=1)
        with llm.trace(path):
            llm.generate(prompt, max_tokens=1)
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [
        {**e, "lane": lanes[e["tid"]]}
        for e in events
        if e["ph"] == "X" and e["name"].startswith(SHOWN) and lanes[e["tid"]] in KINDS
    ]
    _draw(bars).savefig(HERE / "trace.png", dpi=130)


def _draw(bars: list[dict[str, Any]]) -> Figure:
    start = min(e["ts"] for e in bars)
    whole = max(e["ts"] + e["dur"] for e in bars) - start
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.add_subplot()
    for place, (lane, kind) in enumerate(KINDS.items()):
        for name, of_one in groupby((e for e in bars if e["lane"] == lane), lambda e: e["name"]):
            calls = list(of_one)
            spans = [((e["ts"] - start) / 1e3, e["dur"] / 1e3) for e in calls]
            axes.broken_barh(
                spans, (place - 0.35, 0.7), color=COLORS[kind], edgecolor="white", linewidth=0.5
            )
            first, last = spans[0][0], sum(spans[-1])
            if last - first > LABELLED * whole / 1e3:
                label = name.partition(".")[2].replace("_", "_\n")
                axes.text((first + last) / 2, place, label, color="white", ha="center", va="center",
                          fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(KINDS)), list(KINDS))
    axes.invert_yaxis()
    axes.set_xlabel("ms (measured on a PC)")
    return figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plan_picture(Path(folder))
        trace_picture(Path(folder))
