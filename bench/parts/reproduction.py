"""The paper's end-to-end claims beside the simulated chip."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from common import DATA, finish, table

from hetero.backends.host.files import atomic_write
from hetero.models import model_spec
from hetero.profiler.records import DeviceProfile
from hetero.solver.baselines import force, latency_s
from hetero.solver.overheads import Overheads
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario

MODELS = {
    "Llama-8B": "llama-3-8b",
    "Llama-7B": "llama-2-7b",
    "Llama-3B": "llama-3.2-3b",
    "InternLM-1.8B": "internlm2-1.8b",
}
MISALIGNED = (135, 300, 525, 600, 1000)
STRATEGIES = {"auto": "Hetero-tensor", "pipe": "pipe", "padding": "padding",
              "online-prepare": "online-prepare"}  # fmt: skip


def scenario(m: int) -> Scenario:
    """A prompt of m tokens, or decoding (0)."""
    return Scenario("prefill", m) if m else Scenario("decode", 1)


class Chip:
    """What the formulas of `paper_claims.toml` ask: planners of all models on the simulated chip,
    with and without fast synchronisation.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.fast = {name: Planner(model_spec(x), profile) for name, x in MODELS.items()}
        sync = Overheads.slow(self.fast["Llama-8B"].cost)
        self._slow = {x: Planner(model_spec(y), profile, overheads=sync) for x, y in MODELS.items()}
        self._llama = self.fast["Llama-8B"]

    def value(self, formula: str | float) -> float:
        """Of a formula."""
        names = ("speed", "slow", "gain", "seconds", "joules", "down")
        known = {name: getattr(self, name) for name in names} | {"mean": statistics.fmean}
        return float(eval(str(formula), {"__builtins__": {}, **known}))  # of our own data file

    def speed(self, model: str, system: str, m: int) -> float:
        """Tokens per second."""
        return scenario(m).m / force(self.fast[model], scenario(m), system).seconds

    def slow(self, model: str, system: str, m: int) -> float:
        """Tokens per second of the same plan when each wait is a `finish` and operands are copied.

        Its tilings stay, under another planner's synchronisation.
        """
        planner, chosen = self._slow[model], force(self.fast[model], scenario(m), system)
        sync, options = planner.overheads, {}
        for name, option in chosen.options.items():
            tokens, (n, k) = 1 if name == "lm_head" else chosen.scenario.m, planner.shape(name)
            copies = sync.copy(tokens * k) + sync.copy(tokens * n)
            if option.mode == "gpu":
                enter = (0.0, sync.submit_s)
            elif option.mode == "npu":
                enter = (sync.wait_s + copies, copies)
            else:
                submit = sync.submit_s if option.mode == "npu-dominant" else 0.0
                base = sync.join_s + copies
                enter = (sync.wait_s + submit + base, sync.submit_s + base)
            options[name] = option._replace(enter_s=enter)
        return scenario(m).m / planner.evaluate(chosen.scenario, options).seconds

    def gain(self, model: str, system: str, m: int) -> float:
        """Speed with / without fast synchronisation."""
        return self.speed(model, system, m) / self.slow(model, system, m)

    def seconds(self, system: str, m: int) -> float:
        """Of a prompt of Llama-8B, preparation included."""
        return latency_s(self._llama, scenario(m), system)

    def joules(self, system: str) -> float:
        """Of a prompt of 256 tokens, Llama-8B."""
        return force(self._llama, scenario(256), system).joules or math.nan

    def down(self, m: int) -> float:
        """Part of a layer-level step that FFN-down takes."""
        found = force(self._llama, scenario(m), "layer")
        return self._llama.spec.layers * found.options["down"].seconds() / found.seconds


class Claim(NamedTuple):
    """One number of the paper. `within`: allowed deviation as a fraction, None: not a target."""

    key: str
    what: str
    unit: str
    paper: float
    simulated: float
    within: float | None
    reason: str

    @classmethod
    def of(cls, known: dict[str, Any], chip: Chip) -> Claim:
        """An entry of the data file with what the chip says."""
        found = chip.value(known["formula"])
        low, high = known.get("quiet", (math.inf, -math.inf))
        reason = "" if low <= found <= high else known.get("reason", "")
        told = chip.value(known["paper"]), found, known.get("within"), reason
        return cls(known["key"], known["what"], known["unit"], *told)

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

    def cells(self) -> list[str]:
        """A row of the table."""
        numbers = [f"{x:.4g} {self.unit}" for x in (self.paper, self.simulated)]
        target = "" if self.within is None else f"±{100 * self.within:.0f} %"
        verdict = f"{self.verdict}{': ' + self.reason if self.reason else ''}"
        return [self.key, self.what, *numbers, f"{self.ratio:.3f}", target, verdict]


def order(chip: Chip) -> Iterator[str]:
    """Figure 14's text: which strategy beats which at each misaligned length."""
    for m in MISALIGNED:
        times = {x: round(chip.seconds(x, m), 9) for x in STRATEGIES}  # ties
        rank = sorted(STRATEGIES, key=lambda x, of=times: of[x])  # type: ignore[misc]
        shown = " < ".join(f"{STRATEGIES[x]} {times[x] * 1e3:.0f} ms" for x in rank)
        first = "met" if rank[0] == "auto" else "MISSED"
        pipe = "met" if times["pipe"] <= times["padding"] else "MISSED"
        longest = "met" if rank[-1] == "online-prepare" else "differs"
        yield (
            f"- {m}: {shown} | Hetero-tensor first: {first}; pipe ≤ padding: {pipe}; "
            f"online-prepare longest (in most cases): {longest}"
        )


def reproduction(json_: Path | None, profile: str) -> bool:
    """Print all claims (simulated); whether every target is met."""
    chip = Chip(DeviceProfile.load(profile))
    known = tomllib.loads((DATA / "paper_claims.toml").read_text(encoding="utf-8"))
    found = [Claim.of(claim, chip) for claim in known["claim"]]
    table("claim|what|paper|simulated|ratio|target|verdict", [claim.cells() for claim in found])
    ranks = "\n".join(order(chip))
    print(f"\nOrder of strategies (figure 14):\n\n{ranks}\n\nWhat the components contradict:\n")
    print("\n".join(f"- {line}" for line in known["contradictions"]))
    finish(f"simulated: every number beside the paper's, by the profile {profile}")
    if json_ is not None:
        rows = [c._asdict() | {"ratio": c.ratio, "verdict": c.verdict} for c in found]
        atomic_write(json_, json.dumps(rows, indent=1) + "\n")
    return "MISSED" not in ranks and all(claim.verdict != "MISSED" for claim in found)


def command(
    json_: Path | None = typer.Option(None, "--json", help="where to write all claims"),  # noqa: B008
    profile: str = "snapdragon-8-gen-3",
) -> None:
    """The paper's end-to-end claims beside the simulated chip: paper, simulated, ratio.

    The chip is fitted to component timings alone (docs/snapdragon.md), nothing to these claims.
    Exits with 1 if a target is missed.
    """
    raise typer.Exit(not reproduction(json_, profile))
