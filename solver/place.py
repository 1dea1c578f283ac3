"""The tiles of a plan for an option."""

from __future__ import annotations

from collections.abc import Iterator

from hetero.backends.protocol import DeviceKind
from hetero.solver.options import Option
from hetero.solver.plan import Tile
from hetero.solver.tilings import MatMulSpace

Span = tuple[int, int]


def tiles_of(
    space: MatMulSpace, option: Option, m: int, *, open_ended: bool = False
) -> tuple[Tile, ...]:
    """Return the rectangles of a tiling at m tokens; with `open_ended`, for any token count."""
    placed = [*_npu(space, option), *_gpu(space, option, m), *_cpu(space, option, m)]
    if open_ended:
        placed = [t.model_copy(update={"tokens": (0, None)}) for t in placed]
    return tuple(placed)


def _npu(space: MatMulSpace, option: Option) -> Iterator[Tile]:
    if option.npu_tiles is None:
        return
    for span, size in zip(option.npu_tiles.spans, option.npu_tiles.sizes, strict=True):
        yield _tile(space, "npu", span, (0, option.rows), size)


def _gpu(space: MatMulSpace, option: Option, m: int) -> Iterator[Tile]:
    """Yield the complement of the NPU's rows × tokens, cut the way that was costed."""
    n, r = space.n, option.row_cuts[-1]
    t = option.npu_tiles.tokens if option.npu_tiles is not None else 0
    if option.npu_tiles is None or r == 0:
        yield _tile(space, "gpu", (0, m), (0, n), None)
    elif option.tokens_first:
        if r < n:
            yield _tile(space, "gpu", (0, t), (r, n), None)
        if t < m:
            yield _tile(space, "gpu", (t, m), (0, n), None)
    else:
        if r < n:
            yield _tile(space, "gpu", (0, m), (r, n), None)
        if t < m:
            yield _tile(space, "gpu", (t, m), (0, r), None)


def _cpu(space: MatMulSpace, option: Option, m: int) -> Iterator[Tile]:
    if option.cpu_rows:
        yield _tile(space, "cpu", (0, m), option.row_cuts, None)


def _tile(
    space: MatMulSpace, device: DeviceKind, tokens: Span, rows: tuple[int, ...], size: int | None
) -> Tile:
    first, stop = rows
    count = size or tokens[1] - tokens[0]
    chosen = space.kernels.choice(device, count, stop - first, space.k)
    own = chosen.weight_format is space.kernels.base
    return Tile(
        device=device,
        tokens=tokens,
        rows=(first, stop),
        graph_size=size,
        order=chosen.order,
        precision=None if own else chosen.weight_format,
    )
