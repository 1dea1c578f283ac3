"""The paper's end-to-end claims against the simulated chip."""

from __future__ import annotations

import math
import statistics
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from hetero.backends.formats import StorageFormat
from hetero.backends.host.files import atomic_write
from hetero.errors import UserError
from hetero.measuring.executed import Executed, execute
from hetero.models import model_spec
from hetero.profiler.pages import COLORS, render
from hetero.profiler.records import DeviceProfile
from hetero.profiler.table_data import TableData
from hetero.runtime.waits import SyncMethod
from hetero.solver.baselines import force, latency_s
from hetero.solver.names import NamedStrategy
from hetero.solver.options import HOST
from hetero.solver.overheads import Overheads
from hetero.solver.planner import Planner
from hetero.solver.solution import Scenario

MODELS = {
    "Llama-8B": "llama-3-8b",
    "Llama-7B": "llama-2-7b",
    "Llama-3B": "llama-3.2-3b",
    "InternLM-1.8B": "internlm2-1.8b",
}
TITLES = {"tok/s": "Speed", "×": "Ratios", "%": "Savings and shares"}  # of pictures, by unit
NEAR = 0.1
AGREED = 0.05  # executed / predicted - 1, at most
Kind: TypeAlias = Literal["simulated", "fitted"]
MISALIGNED = (135, 300, 525, 600, 1000)
STRATEGIES: dict[NamedStrategy, str] = {
    "auto": "Hetero-tensor", "pipe": "pipe", "padding": "padding",
    "online-prepare": "online-prepare",
}  # fmt: skip


def scenario(m: int) -> Scenario:
    """Return a prompt of m tokens, or decoding (0)."""
    return Scenario("prefill", m) if m else Scenario("decode", 1)


class Figures(ABC):
    """The names in formulas of `paper_claims.toml`, for one way of computing times.

    `m` tokens of a prompt; 0: a decode step.
    """

    @abstractmethod
    def speed(self, model: str, system: NamedStrategy, m: int) -> float:
        """Return tokens per second."""

    @abstractmethod
    def slow(self, model: str, system: NamedStrategy, m: int) -> float:
        """Return tokens per second of the same plan with slow synchronisation.

        Each wait is then a `finish`, and operands are copied. The tilings stay.
        """

    @abstractmethod
    def seconds(self, system: NamedStrategy, m: int) -> float:
        """Return the seconds of a prompt of Llama-8B, preparation included."""

    @abstractmethod
    def joules(self, system: NamedStrategy) -> float:
        """Return the joules of a prompt of 256 tokens, Llama-8B."""

    @abstractmethod
    def down(self, m: int) -> float:
        """Return the share of a layer-level step that FFN-down takes."""

    def gain(self, model: str, system: NamedStrategy, m: int) -> float:
        """Return the speed with / without fast synchronisation."""
        return self.speed(model, system, m) / self.slow(model, system, m)

    def value(self, formula: str | float) -> float:
        """Return the value of a formula."""
        names = ("speed", "slow", "gain", "seconds", "joules", "down")
        known = {name: getattr(self, name) for name in names} | {"mean": statistics.fmean}
        return float(eval(str(formula), {"__builtins__": {}, **known}))  # of our own data file


class PaperChip(Figures):
    """Predicted by the solver: planners of all models on the simulated chip.

    They are with fast synchronisation (`fast`) and without.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        self.fast = {name: Planner(model_spec(x), profile) for name, x in MODELS.items()}
        sync = Overheads.slow(self.fast["Llama-8B"].cost)
        self._slow = {x: Planner(model_spec(y), profile, overheads=sync) for x, y in MODELS.items()}
        self._llama = self.fast["Llama-8B"]

    def speed(self, model: str, system: NamedStrategy, m: int) -> float:
        """Return tokens per second."""
        return scenario(m).m / force(self.fast[model], scenario(m), system).seconds

    def slow(self, model: str, system: NamedStrategy, m: int) -> float:
        """See `Figures.slow`."""
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
                # The host learns that the GPU is done while the NPU still works, and a `finish`
                # leaves an empty queue.
                joined = max(0.0, sync.join_s - (option.elapsed_s - option.gpu_s))
                back = 0.0 if option.leaves == HOST else sync.submit_s
                base = sync.submit_s + joined + back + copies
                enter = (sync.wait_s + base, base)
            options[name] = option._replace(enter_s=enter)
        return scenario(m).m / planner.evaluate(chosen.scenario, options).seconds

    def seconds(self, system: NamedStrategy, m: int) -> float:
        """Return the seconds of a prompt of Llama-8B, preparation included."""
        return latency_s(self._llama, scenario(m), system)

    def joules(self, system: NamedStrategy) -> float:
        """Return the joules of a prompt of 256 tokens, Llama-8B."""
        return force(self._llama, scenario(256), system).joules or math.nan

    def down(self, m: int) -> float:
        """Return the share of a layer-level step that FFN-down takes."""
        solution = force(self._llama, scenario(m), "layer")
        return self._llama.spec.layers * solution.options["down"].seconds() / solution.seconds


class Limit(NamedTuple):
    """A limit of hetero's, the chip without it, and the formula of a claim that it concerns."""

    why: str
    chip: PaperChip
    formula: str


def lifted(profile: DeviceProfile, bytes_per_weight: float) -> DeviceProfile:
    """Return the profile of a chip whose 4-bit weights take so many bytes."""
    own = {"bytes_per_weight": bytes_per_weight}
    predictors = tuple(
        x.model_copy(update={"model": x.model.model_copy(update=own)})
        if x.model is not None and x.weight_format.storage is StorageFormat.Q4
        else x
        for x in profile.predictors
    )
    return profile.model_copy(update={"predictors": predictors})


class ExecutedChip(Figures):
    """Executed by the engine on the simulated chip: the same plans (`execute`)."""

    def __init__(self, chip: PaperChip) -> None:
        self._planners = chip.fast
        self._run = cache(self._execute)

    def _execute(
        self, model: str, system: NamedStrategy, m: int, sync: SyncMethod = "fast"
    ) -> Executed:
        return execute(self._planners[model], MODELS[model], scenario(m), system, sync)

    def speed(self, model: str, system: NamedStrategy, m: int) -> float:
        """See `Figures.speed`."""
        return scenario(m).m / self._run(model, system, m).seconds

    def slow(self, model: str, system: NamedStrategy, m: int) -> float:
        """See `Figures.slow`."""
        return scenario(m).m / self._run(model, system, m, "copy").seconds

    def seconds(self, system: NamedStrategy, m: int) -> float:
        """See `Figures.seconds`."""
        return self._run("Llama-8B", system, m).seconds

    def joules(self, system: NamedStrategy) -> float:
        """See `Figures.joules`."""
        return self._run("Llama-8B", system, 256).joules or math.nan

    def down(self, m: int) -> float:
        """See `Figures.down`."""
        run = self._run("Llama-8B", "layer", m)
        return run.matmul_s["down"] / run.seconds


class Claim(NamedTuple):
    """One number of the paper, predicted by the solver (`simulated`) and executed.

    `within`: allowed deviation of the former from the paper as a fraction, None: not a target.
    `kind`: `fitted` where the chip was fitted to the paper's numbers of this kind.
    `limited`: a limit of hetero, which `reason` names, keeps it from its target.
    """

    key: str
    what: str
    unit: str
    paper: float
    simulated: float
    within: float | None
    reason: str
    executed: float
    kind: Kind = "simulated"
    limited: bool = False

    @classmethod
    def of(cls, known: dict[str, Any], chip: PaperChip, executed: ExecutedChip) -> Claim:
        """Return an entry of the data file with the chip's numbers."""
        value = chip.value(known["formula"])
        low, high = known.get("quiet", (math.inf, -math.inf))
        reason = "" if low <= value <= high else known.get("reason", "")
        fields = chip.value(known["paper"]), value, known.get("within"), reason
        done, kind = executed.value(known["formula"]), known.get("kind", "simulated")
        return cls(known["key"], known["what"], known["unit"], *fields, done, kind)

    @property
    def ratio(self) -> float:
        """Return simulated / paper."""
        return self.simulated / self.paper

    @property
    def difference(self) -> float:
        """Return executed / predicted - 1."""
        return self.executed / self.simulated - 1

    @property
    def agrees(self) -> bool:
        """Return whether executed and predicted are close."""
        return abs(self.difference) <= AGREED

    @property
    def verdict(self) -> str:
        """Return whether the target is met, as a word."""
        if self.within is None:
            return "differs" if self.reason else ""
        if abs(self.ratio - 1) <= self.within:
            return "met"
        return "limited" if self.limited else "MISSED"

    def without(self, limit: Limit) -> Claim:
        """Return the same, limited where it would meet its target without that limit."""
        lifted = limit.chip.value(limit.formula)
        if self.within is None or abs(lifted / self.paper - 1) > self.within:
            return self
        reason = f"{limit.why}; without that it would be {lifted:.4g} {self.unit}"
        return self._replace(limited=True, reason=reason)

    def cells(self) -> list[str]:
        """Return a row of the table."""
        numbers = [f"{x:.4g} {self.unit}" for x in (self.paper, self.simulated, self.executed)]
        difference = f"{100 * self.difference:+.1f} %"
        target = "" if self.within is None else f"±{100 * self.within:.0f} %"
        verdict = ": ".join(x for x in (self.verdict, self.reason) if x)
        return [
            self.key, self.what, *numbers, difference, f"{self.ratio:.3f}", target, self.kind,
            verdict,
        ]  # fmt: skip


def order(chip: Figures) -> Iterator[str]:
    """Return figure 14's text: which strategy is faster than which at each misaligned length."""
    for m in MISALIGNED:
        times = {x: round(chip.seconds(x, m), 5) for x in STRATEGIES}  # ties
        rank = sorted(STRATEGIES, key=lambda x, of=times: of[x])  # type: ignore[misc]
        shown = " < ".join(f"{STRATEGIES[x]} {times[x] * 1e3:.0f} ms" for x in rank)
        first = "met" if rank[0] == "auto" else "MISSED"
        pipe = "met" if times["pipe"] <= times["padding"] else "MISSED"
        longest = "met" if rank[-1] == "online-prepare" else "differs"
        yield (
            f"- {m}: {shown} | Hetero-tensor first: {first}; pipe ≤ padding: {pipe}; "
            f"online-prepare longest (in most cases): {longest}"
        )


class Reproduction(NamedTuple):
    """All claims against the simulated chip, figure 14's orders, components' contradictions."""

    profile: str
    claims: tuple[Claim, ...]
    orders: tuple[str, ...]
    contradictions: tuple[str, ...]

    @property
    def met(self) -> bool:
        """Return whether every stated target is met."""
        missed = any("MISSED" in line for line in self.orders)
        agree = all(claim.agrees for claim in self.claims)
        return agree and not missed and all(claim.verdict != "MISSED" for claim in self.claims)

    def summary(self) -> str:
        """Return the conclusions: targets, and the deviation of all else."""
        aimed = [c for c in self.claims if c.within is not None]
        met = sum(c.verdict == "met" for c in aimed)
        limited = sum(c.verdict == "limited" for c in aimed)
        kept = f"; a limit that the table names keeps {limited} from it" if limited else ""
        others = [c for c in self.claims if c.within is None]
        near = sum(abs(c.ratio - 1) <= NEAR for c in others)
        return (
            f"{met} of the {len(aimed)} claims that have a target are within it{kept}. Of the "
            f"{len(others)} others {near} are within {100 * NEAR:.0f} % of the paper's number; the "
            "table says why the rest differs, and where the paper contradicts itself. "
            + self._agreement()
        )

    def _agreement(self) -> str:
        """Return how close execution is to prediction, and speeds to the paper's."""
        close = sum(claim.agrees for claim in self.claims)
        executed = (
            f"Executed launch by launch, {close} of {len(self.claims)} are within "
            f"{100 * AGREED:.0f} % of what the solver predicted."
        )
        speeds = [abs(claim.ratio - 1) for claim in self.claims if claim.unit == "tok/s"]
        if not speeds:
            return executed
        off = 100 * statistics.median(speeds)
        return (
            f"{executed} The median difference of {len(speeds)} speeds to the paper's: {off:.1f} %."
        )

    def table(self) -> TableData:
        """Return a row for each claim."""
        rows = tuple(tuple(claim.cells()) for claim in self.claims)
        head = (
            "claim", "what", "paper", "predicted", "executed", "executed / predicted",
            "predicted / paper", "target", "kind", "verdict",
        )  # fmt: skip
        return TableData("", head, rows, lead=2, numbers=head[2:7])

    def remarks(self) -> list[str]:
        """Return the lines after the table."""
        return [
            self._agreement(),
            "Order of strategies (figure 14), executed:",
            *self.orders,
            "What the components contradict:",
            *(f"- {line}" for line in self.contradictions),
            f"simulated: every number next to the paper's, by the profile {self.profile}; fitted: "
            "by watts that were fitted to the paper's own mean powers, no evidence of energy",
        ]

    def document(self) -> list[dict[str, Any]]:
        """Return the JSON document."""
        return [
            c._asdict()
            | {"ratio": c.ratio, "verdict": c.verdict, "predicted": c.simulated}
            | {"difference": c.difference}
            for c in self.claims
        ]

    def report(self, path: Path) -> None:
        """Write a page with the paper's numbers drawn next to ours. Raises `UserError`."""
        if path.suffix.lower() not in (".html", ".htm"):
            raise UserError(f"the reproduction is drawn as a page ({path}): choose .html")
        text = render(
            "reproduction.html",
            title="The paper against the simulated chip",
            profile=self.profile,
            met=self.met,
            summary=self.summary(),
            charts=[_chart(name, list(claims)) for name, claims in self._figures()],
            table=self.table(),
            orders=self.orders,
            contradictions=self.contradictions,
        )
        atomic_write(path, text)

    def _figures(self) -> Iterator[tuple[str, list[Claim]]]:
        """Return pictures of the claims with one unit, as far as they are comparable."""
        for unit in dict.fromkeys(claim.unit for claim in self.claims):
            yield unit, [claim for claim in self.claims if claim.unit == unit]


def _chart(unit: str, claims: list[Claim]) -> Any:
    """Return bars of the paper and of the simulated chip; targets with their range."""
    import numpy as np

    from hetero.profiler.pages.figures import Chart, new_axes, own_style, svg_of

    with own_style():
        axes = new_axes(height=1.0 + 0.36 * len(claims))
        places = np.arange(len(claims))
        paper = [c.paper for c in claims]
        axes.barh(places - 0.2, paper, 0.38, color=COLORS["rest"], label="paper")
        off = [c.paper * (c.within or 0.0) for c in claims]
        axes.barh(
            places + 0.2, [c.executed for c in claims], 0.38, color=COLORS["both"],
            label="executed (simulated)",
        )  # fmt: skip
        axes.errorbar(paper, places - 0.2, xerr=off, fmt="none", ecolor="#1a1d21", lw=1)
        axes.set_yticks(places, [c.what for c in claims], fontsize=7.5)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
        title = TITLES.get(unit, unit)
        targets = sum(c.within is not None for c in claims)
        met = sum(c.verdict == "met" for c in claims)
        note = (
            f"{met} of {targets} targets (thin lines) are met; {len(claims) - targets} have none."
        )
        return Chart(title, note, svg_of(axes, f"{title} {len(claims)}"))


def reproduce(profile: str = "snapdragon-8-gen-3") -> Reproduction:
    """Return the paper's end-to-end claims against the simulated chip (a minute at most)."""
    chip = PaperChip(DeviceProfile.load(profile))
    executed = ExecutedChip(chip)
    data = resources.files("hetero.measuring") / "data" / "paper_claims.toml"
    known = tomllib.loads(data.read_text(encoding="utf-8"))
    limits = {
        key: (x["why"], PaperChip(lifted(DeviceProfile.load(profile), x["bytes_per_weight"])))
        for key, x in known["limits"].items()
    }
    claims = []
    for entry in known["claim"]:
        claim = Claim.of(entry, chip, executed)
        if claim.verdict == "MISSED" and "limit" in entry:
            claim = claim.without(Limit(*limits[entry["limit"]], entry["formula"]))
        claims.append(claim)
    return Reproduction(
        profile,
        tuple(claims),
        tuple(order(executed)),
        tuple(known["contradictions"]),
    )
