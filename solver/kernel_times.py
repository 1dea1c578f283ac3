"""Tables of kernel times: the fastest allowed format and operand order at every size.

Notation: M token counts, N row counts; seconds are float64 [M, N], infinite where no
kernel may run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.backends.formats import WeightFormat
from hetero.backends.ops import OperandOrder
from hetero.backends.protocol import EVERY_KIND, KINDS, DeviceKind
from hetero.profiler.cost import CostModel
from hetero.profiler.grid import WIDE
from hetero.profiler.records import phase_of

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]
Bools: TypeAlias = npt.NDArray[np.bool_]
Precision: TypeAlias = Literal["auto", "a16", "a8", "any"]


class KernelOption(NamedTuple):
    """A format and an operand order in which a device may compute a matmul."""

    weight_format: WeightFormat
    order: OperandOrder

    @property
    def label(self) -> str:
        """Return the option in words, for tables."""
        return f"{self.weight_format.value}" + ("" if self.order == "plain" else " transposed")


class TimeTable(NamedTuple):
    """[M, N] seconds, and the index into the device's options that gives them."""

    seconds: Floats
    option: Ints


class KernelTimes:
    """Times of the devices under one rule of precision.

    Immutable. `base` is the format of tiles that name none.
    """

    def __init__(
        self,
        cost: CostModel,
        weight_format: WeightFormat,
        precision: Precision = "auto",
        base: WeightFormat | None = None,
    ) -> None:
        self.cost, self.weight_format, self.precision = cost, weight_format, precision
        self.base = base or weight_format
        self._quarantined = {entry.device for entry in cost.profile.quarantined}
        self.options: dict[DeviceKind, tuple[KernelOption, ...]] = {
            kind: self._options(kind)
            for kind in EVERY_KIND
            if kind in KINDS or kind in cost.profile.devices
        }
        self._choices: dict[tuple[DeviceKind, int, int, int], KernelOption] = {}
        self._allowed: dict[tuple[DeviceKind, KernelOption, str, str], bool] = {}

    def has(self, device: DeviceKind) -> bool:
        """Return whether the device has any kernel for this model."""
        return bool(self.options.get(device))

    def table(self, device: DeviceKind, ms: npt.ArrayLike, ns: npt.ArrayLike, k: int) -> TimeTable:
        """Return times of all pairs of token counts [M] and rows [N]; nothing (0) costs nothing."""
        tokens, rows = np.asarray(ms, np.float64), np.asarray(ns, np.float64)
        parts = [self._seconds(device, option, tokens, rows, k) for option in self.options[device]]
        if not parts:
            parts = [np.full((len(tokens), len(rows)), np.inf)]
        chosen = parts[0]
        index = np.zeros(chosen.shape, dtype=np.intp)
        for i, part in enumerate(parts[1:], start=1):
            better = part < chosen
            if self.precision == "auto" and not self._is_base(device, i):
                better &= ~self._base_exists(device, parts)
            chosen, index = np.where(better, part, chosen), np.where(better, i, index)
        chosen[tokens == 0] = 0.0
        chosen[:, rows == 0] = 0.0
        return TimeTable(chosen, index)

    def uncertainty(
        self, device: DeviceKind, ms: npt.ArrayLike, ns: npt.ArrayLike, k: int
    ) -> Floats:
        """Return by which fraction the times of `table` may be off (`CostModel.uncertainty`)."""
        tokens, rows = np.asarray(ms, np.float64), np.asarray(ns, np.float64)
        chosen = self.table(device, ms, ns, k).option
        fractions = np.zeros(chosen.shape)
        for i, (weight_format, order) in enumerate(self.options[device]):
            own = self.cost.uncertainty(device, weight_format, tokens, rows, k, order)
            fractions = np.where(chosen == i, own, fractions)
        return fractions

    def choice(self, device: DeviceKind, m: int, n: int, k: int) -> KernelOption:
        """Return the kernel that gives the time of one pair of sizes."""
        options = self.options[device]
        if len(options) == 1:
            return options[0]
        key = (device, m, n, k)
        if key not in self._choices:
            self._choices[key] = options[int(self.table(device, [m], [n], k).option[0, 0])]
        return self._choices[key]

    def remember(self, device: DeviceKind, ms: Iterable[int], ns: Iterable[int], k: int) -> None:
        """Look `choice` up for all pairs of token counts and rows at once."""
        options, tokens, rows = self.options[device], list(ms), list(ns)
        if len(options) > 1 and tokens:
            indices = self.table(device, tokens, rows, k).option
            for i, m in enumerate(tokens):
                for j, n in enumerate(rows):
                    self._choices[device, m, n, k] = options[int(indices[i, j])]

    def _is_base(self, device: DeviceKind, i: int) -> bool:
        return self.options[device][i].weight_format is self.weight_format

    def _base_exists(self, device: DeviceKind, parts: list[Floats]) -> Bools:
        base = [np.isfinite(p) for i, p in enumerate(parts) if self._is_base(device, i)]
        return np.any(base, axis=0) if base else np.zeros(parts[0].shape, dtype=np.bool_)

    def _options(self, device: DeviceKind) -> tuple[KernelOption, ...]:
        """Return own format first; other activations of the same stored weights after it."""
        storage = self.weight_format.storage
        options = [
            KernelOption(p.weight_format, p.order)
            for p in self.cost.profile.predictors
            if p.device == device
            and p.weight_format.storage is storage
            and self._fits(p.weight_format)
        ]
        base = [option for option in options if option.weight_format is self.weight_format]
        if self.precision == "auto" and base and device not in self._quarantined:
            options = base  # nothing else would ever be chosen
        return tuple(sorted(options, key=lambda o: (o.weight_format is not self.weight_format, o)))

    def _fits(self, weight_format: WeightFormat) -> bool:
        eight = weight_format.activations.bits == 8
        return self.precision in ("auto", "any") or eight == (self.precision == "a8")

    def _seconds(
        self, device: DeviceKind, option: KernelOption, ms: Floats, ns: Floats, k: int
    ) -> Floats:
        seconds = self.cost.table_s(
            device,
            option.weight_format,
            np.maximum(ms, 1),
            np.maximum(ns, 1),
            k,
            option.order,
        )
        if device not in self._quarantined:
            return seconds
        decode = np.asarray([phase_of(int(m)) == "decode" for m in ms])[:, None]
        aspects = np.where(ns >= WIDE * k, 2, np.where(k >= WIDE * ns, 0, 1))
        for phase, chosen in (("decode", decode), ("prefill", ~decode)):
            for code in np.unique(aspects):
                if not self._is_allowed(device, option, phase, int(code), k):
                    seconds = np.where(chosen & (aspects == code)[None, :], np.inf, seconds)
        return seconds

    def _is_allowed(
        self, device: DeviceKind, option: KernelOption, phase: str, aspect: int, k: int
    ) -> bool:
        key = (device, option, phase, str(aspect))
        if key not in self._allowed:
            m = 1 if phase == "decode" else 256
            n = (max(k // 2, 1), k, 2 * k)[aspect]
            self._allowed[key] = bool(
                self.cost.allowed(device, option.weight_format, m, n, k, option.order)
            )
        return self._allowed[key]
