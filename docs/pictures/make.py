"""Makes the pictures of README: `python docs/pictures/make.py`, with Chromium and hetero installed.

`plan.png` is the top of a plan's report in a browser, `trace.png` the first layers of a prompt in a
trace of `--device hetero` on this machine, its lanes as a viewer of traces shows them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import hetero
from hetero.profiler.pages import COLORS

HERE = Path(__file__).resolve().parent
SIZE = "1180,1010"
SHOWN = 0.15  # of the time of a prompt


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
    """Lanes of the first layers of a prompt."""
    path, prompt = work / "trace.json", list(range(256))
    with hetero.LLM("random:qwen2.5-0.5b", device="hetero", profile="host", max_seq_len=300) as llm:
        llm.logits(prompt)
        with llm.trace(path):
            llm.logits(prompt)
    events = json.loads(path.read_text())["traceEvents"]
    bars = [e for e in events if e.get("ph") == "X"]
    whole = max(e["ts"] + e["dur"] for e in bars) - min(e["ts"] for e in bars)
    end = min(e["ts"] for e in bars) + SHOWN * whole
    kept = [e for e in events if e.get("ph") == "M" or (e.get("ph") == "X" and e["ts"] < end)]
    _draw(kept).savefig(HERE / "trace.png", dpi=130)


def _draw(events: list[dict[str, Any]]) -> Figure:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    start = min(e["ts"] for e in bars)
    lanes = sorted({(e["pid"], e["tid"]) for e in bars})
    figure = Figure(figsize=(9, 0.8 + 0.6 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for place, lane in enumerate(lanes):
        name = str(names.get(lane, lane)).lower()
        color = next((COLORS[kind] for kind in ("gpu", "npu") if kind in name), COLORS["rest"])
        spans = [
            ((e["ts"] - start) / 1e3, e["dur"] / 1e3) for e in bars if (e["pid"], e["tid"]) == lane
        ]
        axes.broken_barh(spans, (place - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(lanes)), [str(names.get(lane, lane)) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms (measured)")
    return figure


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plan_picture(Path(folder))
        trace_picture(Path(folder))
