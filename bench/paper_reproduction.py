"""The paper's end-to-end claims beside the simulated chip: paper, simulated, ratio.

    python bench/paper_reproduction.py [--json FILE] [--profile FILE]

The simulated chip is fitted to component timings alone (docs/snapdragon.md); nothing was fitted to
these claims. Claims that the component timings contradict are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from hetero.backends.host.files import atomic_write
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import force, latency_s
from hetero.solver.overheads import Overheads
from hetero.solver.planner import Planner, Scenario, Solution

MODELS = {
    "Llama-8B": "llama-3-8b",
    "Llama-7B": "llama-2-7b",
    "Llama-3B": "llama-3.2-3b",
    "InternLM-1.8B": "internlm2-1.8b",
}
MISALIGNED = (135, 300, 525, 600, 1000)
DECODE = Scenario("decode", 1)


class Claim(NamedTuple):
    """One number of the paper. `within`: allowed deviation as a fraction, None: not a target."""

    key: str
    what: str
    unit: str
    paper: float
    simulated: float
    within: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Simulated / paper."""
        return self.simulated / self.paper

    @property
    def verdict(self) -> str:
        """Whether the target is met."""
        if self.within is None:
            return "differs" if self.reason else ""
        return "met" if abs(self.ratio - 1) <= self.within else "MISSED"


class Chip:
    """Planners of all models on the simulated chip, with and without fast synchronisation."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.fast = {name: Planner(model_spec(x), profile) for name, x in MODELS.items()}
        slow = Overheads.slow(self.fast["Llama-8B"].cost)
        self.slow = {
            name: Planner(model_spec(x), profile, overheads=slow) for name, x in MODELS.items()
        }

    def speed(self, model: str, system: str, scenario: Scenario) -> float:
        """Tokens per second."""
        return scenario.m / force(self.fast[model], scenario, system).seconds

    def without_fast_sync(self, model: str, system: str, scenario: Scenario) -> float:
        """Seconds of the same plan when each wait is a `finish` and operands are copied."""
        planner = self.slow[model]
        chosen = force(self.fast[model], scenario, system)
        return _same_plan(planner, chosen).seconds

    def sync_gain(self, model: str, system: str, scenario: Scenario) -> float:
        """Speed with / without fast synchronisation."""
        fast = force(self.fast[model], scenario, system).seconds
        return self.without_fast_sync(model, system, scenario) / fast


def _same_plan(planner: Planner, chosen: Solution) -> Solution:
    """The same tilings under another planner's synchronisation."""
    scenario, options = chosen.scenario, {}
    for name, option in chosen.options.items():
        m = 1 if name == "lm_head" else scenario.m
        sync = planner.overheads
        n, k = planner.shape(name)
        copies = sync.copy(m * k) + sync.copy(m * n)
        match option.mode:
            case "gpu":
                enter = (0.0, sync.submit_s)
            case "npu":
                enter = (sync.wait_s + copies, copies)
            case _:
                submit = sync.submit_s if option.mode == "npu-dominant" else 0.0
                base = sync.join_s + copies
                enter = (sync.wait_s + submit + base, sync.submit_s + base)
        options[name] = option._replace(enter_s=enter)
    return planner.evaluate(scenario, options)


def claims(chip: Chip) -> Iterable[Claim]:
    """All claims that the model covers."""
    yield from prefill(chip)
    yield from misaligned(chip)
    yield from decode(chip)
    yield from synchronisation(chip)
    yield from other_models(chip)
    yield from energy(chip)


_LONG_GPU = (
    "the GPU's FFN-down timings rise by 15 ms from 257 to 384 tokens, 117 µs a token, and average "
    "138 up to 256; the paper's GPU at 1024 tokens would need more than that average"
)


def prefill(chip: Chip) -> Iterable[Claim]:
    """Section 5.2.1, Llama-8B at graph sizes."""
    at = {m: Scenario("prefill", m) for m in (32, 64, 256, 1024)}
    tensor = {m: chip.speed("Llama-8B", "auto", s) for m, s in at.items()}
    layer = {m: chip.speed("Llama-8B", "layer", s) for m, s in at.items()}
    gpu = chip.speed("Llama-8B", "gpu-only", at[256])
    yield Claim("e54-fs-256", "Hetero-tensor, 256", "tok/s", 236.92, tensor[256], 0.10)
    yield Claim("e521-ht-llama8b", "Hetero-tensor, 1024", "tok/s", 247.9, tensor[1024], 0.10)
    yield Claim(
        "e56-speed-ht-vs-hl", "Hetero-layer, 256", "tok/s", 236.92 / 1.244, layer[256], 0.10
    )
    yield Claim(
        "e51-hl, e521-ht1024", "Hetero-layer, 1024", "tok/s", 247.9 * 25.1 / 34.5, layer[1024], 0.10
    )
    yield Claim("e521-hl256-ppl", "GPU-only, 256", "tok/s", 236.92 / 1.244 / 2.99, gpu, 0.15)
    gains = [tensor[m] / layer[m] for m in (64, 256, 1024)]
    yield Claim(
        "e521-ht-vs-hl-avg", "Hetero-tensor / Hetero-layer, mean", "x", 1.302, sum(gains) / 3, None,
        "every matmul is cut here, the paper names FFN-down: its own timings favour "
        "a GPU share of a tenth to a fifth in the others too, so that cut is kept",
    )  # fmt: skip
    yield Claim(
        "e521-ht-vs-hl-max", "Hetero-tensor / Hetero-layer, 32", "x", 1.408, tensor[32] / layer[32]
    )
    yield Claim("e521-hl256-ppl", "Hetero-layer / GPU-only, 256", "x", 2.99, layer[256] / gpu)
    yield Claim(
        "e56-speed-ht-vs-ppl", "Hetero-tensor / GPU-only, 256", "x", 3.72, tensor[256] / gpu, None,
        "our GPU alone is 7 % slower and our cut 7 % faster, both within their targets",
    )  # fmt: skip
    for m, least in ((64, 3.67), (1024, 3.17)):
        ratio = layer[m] / chip.speed("Llama-8B", "gpu-only", at[m])
        yield Claim(
            f"e521-hl{m}-range", f"Hetero-layer / GPU-only, {m} (over other GPU engines: {least}+)",
            "x", least, ratio, None, "" if ratio >= least else _LONG_GPU,
        )  # fmt: skip
    yield Claim(
        "ffn-down-share", "FFN-down's share of Hetero-layer prefill, 256 (nearly half)", "x", 0.5,
        _share_of_down(chip, at[256]),
    )  # fmt: skip


def _share_of_down(chip: Chip, scenario: Scenario) -> float:
    """Part of a layer-level step that FFN-down takes."""
    planner = chip.fast["Llama-8B"]
    found = force(planner, scenario, "layer")
    return planner.spec.layers * found.options["down"].seconds() / found.seconds


def misaligned(chip: Chip) -> Iterable[Claim]:
    """Section 5.2.2, figure 14."""
    planner = chip.fast["Llama-8B"]
    seconds = {
        (m, x): latency_s(planner, Scenario("prefill", m), x)
        for m in MISALIGNED
        for x in ("auto", "padding", "pipe", "online-prepare")
    }
    prepare = 0.1520 + 1.8978e-3 * 525
    slow = (
        f"preparing 525 tokens takes {prepare:.2f} s between the two measured points, computing "
        "them less than padding to 1024; the paper's ratio needs 2.9 s of preparation, more "
        "than its own 2.05 s at 1000 tokens"
    )
    for x, paper, within, reason in (
        ("online-prepare", 2.24, None, slow),
        ("padding", 2.21, None, "our plan is faster by the cut of all matmuls (above)"),
        ("pipe", 1.35, None, "our plan is faster by the cut of all matmuls (above)"),
    ):
        ratio = seconds[525, x] / seconds[525, "auto"]
        yield Claim(
            f"e522-ht525-{x}", f"{x} / Hetero-tensor, 525", "x", paper, ratio, within, reason
        )
    above = [
        latency_s(planner, Scenario("prefill", m), "padding")
        / latency_s(planner, Scenario("prefill", m), "auto")
        for m in (135, 300, 525, 600)
    ]
    yield Claim(
        "e522-padding-avg", "padding / Hetero-tensor, above a size", "x", 1.91, sum(above) / 4,
        None, "our plan is faster by the cut of all matmuls (above)",
    )  # fmt: skip
    for m in MISALIGNED:
        saved = 100 * (1 - seconds[m, "auto"] / seconds[m, "pipe"])
        reason = (
            "" if 13.2 <= saved <= 30.1 else "same cause as above; the paper's range ends at 30.1"
        )
        yield Claim(
            "e522-vs-pipe", f"saved against pipe, {m} (13.2 … 30.1)", "%", 30.1, saved, None, reason
        )
    yield preparation(seconds)


def preparation(seconds: dict[tuple[int, str], float]) -> Claim:
    """What online preparation adds."""
    share = 100 * 0.4084 / seconds[135, "online-prepare"]
    return Claim(
        "e522-prep-135-share", "preparation's share of online-prepare, 135", "%", 34.6, share
    )


def decode(chip: Chip) -> Iterable[Claim]:
    """Section 5.3."""
    tensor, gpu = (chip.speed("Llama-8B", x, DECODE) for x in ("auto", "gpu-only"))
    yield Claim("e53-decode-l8b", "decode, Hetero-tensor", "tok/s", 14.01, tensor, 0.10)
    yield Claim("e53-decode, -vs-ppl", "decode, GPU-only", "tok/s", 14.01 / 1.234, gpu, 0.10)
    layer = chip.speed("Llama-8B", "layer", DECODE)
    yield Claim("e53-hl-decode-eq-ppl", "decode, Hetero-layer / GPU-only", "x", 1.0, layer / gpu)
    yield Claim(
        "e53-decode-vs-ppl-l8b", "decode, Hetero-tensor / GPU-only", "x", 1.234, tensor / gpu, None,
        "the NPU's own timings (170 µs a call, 3.5 times slower on FFN-down) leave it little of "
        "o and FFN-down; 59.1 / 43.3 GB/s would allow 1.365",
    )  # fmt: skip


def synchronisation(chip: Chip) -> Iterable[Claim]:
    """Section 5.4: gains are met within a third."""
    lengths = [Scenario("prefill", m) for m in (64, 256, 1024)]
    for system, name, paper in (("layer", "Hetero-layer", 15.8), ("auto", "Hetero-tensor", 24.3)):
        gains = [chip.sync_gain("Llama-8B", system, s) for s in lengths]
        mean = 100 * (sum(gains) / 3 - 1)
        yield Claim(
            f"e54-fs-{system}", f"fast sync, prefill, {name}, mean", "%", paper, mean, 1 / 3
        )
    at256 = 256 / chip.without_fast_sync("Llama-8B", "auto", lengths[1])
    yield Claim("e54-nofs-256", "Hetero-tensor without fast sync, 256", "tok/s", 196.44, at256)
    gain = chip.sync_gain("Llama-8B", "auto", DECODE)
    yield Claim("e54-fs-decode-l8b", "fast sync, decode, Hetero-tensor", "x", 4.01, gain, 1 / 3)


_SYNC_REASONS = {
    True: "fixed costs per matmul that fit Llama-8B weigh more on its short ones",
    False: "the same fixed costs weigh as on Llama-8B, whose matmuls are about as long",
}


def other_models(chip: Chip) -> Iterable[Claim]:
    """Sections 5.2.1 to 5.4 on the other models: none of them is a target."""
    at256 = Scenario("prefill", 256)
    shape = "its widths (k = 2048, 8192) were not timed"
    yield Claim(
        "e521-ht-internlm", "InternLM-1.8B, Hetero-tensor, 256", "tok/s", 1092,
        chip.speed("InternLM-1.8B", "auto", at256), None, shape,
    )  # fmt: skip
    for model, tensor, gain in (("Llama-3B", 29.9, 1.0852), ("InternLM-1.8B", 51.12, 1.1338)):
        speeds = [chip.speed(model, x, DECODE) for x in ("auto", "gpu-only")]
        yield Claim(
            f"e53-decode {model}", f"{model}, decode, Hetero-tensor", "tok/s", tensor, speeds[0]
        )
        yield Claim(
            f"e53-decode-vs-ppl {model}", f"{model}, decode, gain", "x", gain, speeds[0] / speeds[1]
        )
    lengths = [Scenario("prefill", m) for m in (64, 256, 1024)]
    ratios = [
        chip.speed("Llama-3B", "auto", s) / chip.speed("Llama-3B", "gpu-only", s) for s in lengths
    ]
    yield Claim(
        "e521-ht-l3b-ppl", "Llama-3B, Hetero-tensor / GPU-only, mean", "x", 3.51, sum(ratios) / 3,
        None, "its widths (k = 3072, 8192) were not timed, and every matmul is cut here",
    )  # fmt: skip
    for model, layer, tensor in (("Llama-7B", 31.7, 49.0), ("InternLM-1.8B", 26.7, 34.5)):
        for system, paper in (("layer", layer), ("auto", tensor)):
            gains = [chip.sync_gain(model, system, s) for s in lengths]
            mean = 100 * (sum(gains) / 3 - 1)
            why = "" if abs(mean / paper - 1) < 1 / 3 else _SYNC_REASONS[mean > paper]
            what = f"{model}, fast sync, prefill, {system}"
            yield Claim(f"e54-fs {model}", what, "%", paper, mean, None, why)
    for model in ("Llama-7B", "Llama-3B", "InternLM-1.8B"):
        gain = chip.sync_gain(model, "auto", DECODE)
        yield Claim(f"e54-fs-decode {model}", f"{model}, fast sync, decode", "x", 2.2, gain, None,
                    "" if abs(gain / 2.2 - 1) < 1 / 3 else
                    "four fixed 400 µs costs per cut matmul explain 4.01 on Llama-8B, more here",
                    )  # fmt: skip


def energy(chip: Chip) -> Iterable[Claim]:
    """Section 5.6. Power was fitted to these three means, so only energy is a consequence."""
    at256 = Scenario("prefill", 256)
    joules = {
        x: force(chip.fast["Llama-8B"], at256, x).joules or math.nan
        for x in ("auto", "layer", "gpu-only")
    }
    reason = (
        "the paper's numbers contradict each other: 1.232 times the power in 1 / 1.244 of the time "
        "is 1 % less energy, not 3.3 % more"
    )
    yield Claim("e56-energy-ht-vs-hl", "energy, Hetero-tensor / Hetero-layer", "x", 1.033,
                joules["auto"] / joules["layer"], None, reason)  # fmt: skip
    yield Claim("e56-energy-ht-vs-ppl", "energy, GPU-only / Hetero-tensor", "x", 5.87,
                joules["gpu-only"] / joules["auto"])  # fmt: skip


def order(chip: Chip) -> list[str]:
    """Figure 14's text: which strategy beats which at each misaligned length."""
    planner = chip.fast["Llama-8B"]
    names = ("auto", "pipe", "padding", "online-prepare")
    lines = []
    for m in MISALIGNED:
        times = {x: round(latency_s(planner, Scenario("prefill", m), x), 9) for x in names}  # ties
        rank = sorted(names, key=lambda x: times[x])
        shown = " < ".join(
            f"{'Hetero-tensor' if x == 'auto' else x} {times[x] * 1e3:.0f} ms" for x in rank
        )
        first = "met" if rank[0] == "auto" else "MISSED"
        pipe = "met" if times["pipe"] <= times["padding"] else "MISSED"
        longest = "met" if rank[-1] == "online-prepare" else "differs"
        lines.append(f"{m}: {shown} | Hetero-tensor first: {first}; pipe ≤ padding: {pipe}; "
                     f"online-prepare longest (in most cases): {longest}")  # fmt: skip
    return lines


CONTRADICTIONS = (
    "Online-prepare is longest only at 1000 tokens. The paper's own numbers forbid it below: its "
    "preparation takes 408 ms at 135 tokens and 2050 ms at 1000, so about 0.72, 1.15 and 1.29 s at "
    "300, 525 and 600, while padding to 256, 512, 1024 and 1024 tokens costs 0.6, 1.1, 2.8 and "
    "2.3 s more than those tokens alone, at the paper's Hetero-layer speed (180 to 190 tok/s).",
    "Power: Hetero-tensor (2.75 W) below the GPU alone (4.34 W) although the GPU works for most of "
    "the time in any cut that balances: the profile's power of both has no physical meaning.",
    "Single-processor bandwidth of 40 to 45 GB/s holds for the GPU; the NPU's one-token timings "
    "stream at 16.5 GB/s. With 43.3 GB/s of the GPU that is 59.8 GB/s, the paper's 59.1 together.",
)


def table(found: Iterable[Claim]) -> str:
    """Markdown, all numbers simulated."""
    lines = [
        "| claim | what | paper | simulated | ratio | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in found:
        target = "" if c.within is None else f"±{100 * c.within:.0f} %"
        lines.append(
            f"| {c.key} | {c.what} | {c.paper:.4g} {c.unit} | {c.simulated:.4g} {c.unit} | "
            f"{c.ratio:.3f} | {target} | {c.verdict}{': ' + c.reason if c.reason else ''} |"
        )
    return "\n".join(lines)


def main(load: Callable[[str], DeviceProfile] = DeviceProfile.load) -> int:
    """Print; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", default="snapdragon-8-gen-3")
    arguments = parser.parse_args()
    target = arguments.json
    chip = Chip(load(arguments.profile))
    found = list(claims(chip))
    ranks = order(chip)
    print(table(found))
    print("\nOrder of strategies (figure 14):\n\n" + "\n".join(f"- {line}" for line in ranks))
    print("\nWhat the components contradict:\n\n" + "\n".join(f"- {c}" for c in CONTRADICTIONS))
    if target is not None:
        rows = [c._asdict() | {"ratio": c.ratio, "verdict": c.verdict} for c in found]
        atomic_write(target, json.dumps(rows, indent=1) + "\n")
    missed = [c for c in found if c.verdict == "MISSED"]
    return 1 if missed or any("MISSED" in line for line in ranks) else 0


if __name__ == "__main__":
    raise SystemExit(main())
