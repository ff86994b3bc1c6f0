"""How chunks of depthwise convolutions of 8-bit images walk through rows, pixels and channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from rlx.backends.cpu.gemm.epilogue import Epilogue
from rlx.backends.cpu.gemm.panels.int8_layout import FinishArguments
from rlx.backends.cpu.kernels.conv.depthwise import PlaneArguments, chunk_parts
from rlx.backends.cpu.llvm.builder import Function, void
from rlx.backends.cpu.loops.emitter import Emitter, Scope
from rlx.backends.cpu.schedule.arguments import Address, Number
from rlx.records import dataclass

__all__ = ["Body", "Int8DepthwiseArguments", "Pixels"]


class Int8DepthwiseArguments(PlaneArguments):
    """The arguments of a depthwise kernel of bytes."""

    sums: Address  # of the weights
    out: Address
    out_step: Number  # from pixel to pixel
    scratch: Address
    scratch_stride: Number


@dataclass(frozen=True)
class Pixels:
    """Neighbouring pixels of a row of results, from `ox` on."""

    places: list[tuple[str, str]]  # of each row of the first one's window: where it starts, the step along it
    padding: str  # a pixel of it
    ox: str
    count: int
    edge: bool  # whether columns may be outside the image
    row: str  # the number of the row's first one


@dataclass(frozen=True)
class Body(ABC):
    """Emits the code of one chunk; those that derive from it say how pixels are computed."""

    f: Function
    emitter: Emitter
    epilogue: Epilogue
    w: Int8DepthwiseArguments
    kernel: tuple[int, int]
    stride: int
    dilation: int
    signed: bool
    result: str  # "u8" or "i8" where results are requantised in registers, else ""
    biased: bool
    clamped: bool
    fill: str  # i8: what padding holds
    finishing: str
    top: Scope

    @property
    def at_once(self) -> int:
        """Pixels that are computed at once."""
        return 4

    def begin(self, c0: str, c1: str) -> None:  # noqa: B027 - for most there is nothing to do
        """Emits what comes before all pixels of channels [c0, c1)."""

    @abstractmethod
    def channels(self, c0: str, c1: str, pixels: Pixels) -> None:
        """Emits the results of these channels."""

    def emit(self) -> None:
        f, w = self.f, self.w
        image, row0, row1, c0, c1 = chunk_parts(f, w)
        padding = self.scratch()
        fill = f.splat(self.fill, 64)
        f.loop(0, w.channels, 64, [], lambda i, _: f.store(fill, f.offset(padding, i)))
        x = f.offset(w.x, f.mul(image, w.x_n))
        if not self.result:
            self.emitter.hoist(self.epilogue.expr, frozenset((self.epilogue.column, *self.epilogue.rows)), self.top)
        self.begin(c0, c1)

        def row(oy: str, _: list[str]) -> None:
            first = f.mul(f.add(f.mul(image, w.out_height), oy), w.out_width)
            lines = self.lines(x, padding, oy)

            def pixels(ox: str, count: int, *, edge: bool) -> None:
                """Neighbouring pixels, all their channels: an image of many is read once, line by line."""
                places = [(f.offset(p, f.mul(f.mul(ox, w.stride_w), step)), step) for p, step in lines]
                self.channels(c0, c1, Pixels(places, padding, ox, count, edge, first))

            def group(ox: str, _: list[str]) -> None:  # the last one overlaps the one before it
                at = f.min(ox, f.sub(w.out_width, self.at_once))
                inside = f.and_(
                    f.cmp("ge", at, w.inner_from),
                    f.cmp("le", f.add(at, self.at_once), w.inner_to),
                    "i1",
                )
                f.if_(inside, lambda: pixels(at, self.at_once, edge=False), lambda: pixels(at, self.at_once, edge=True))

            f.if_(
                f.cmp("ge", w.out_width, self.at_once),
                lambda: void(f.loop(0, w.out_width, self.at_once, [], group)),
                lambda: void(f.loop(0, w.out_width, 1, [], lambda ox, _: pixels(ox, 1, edge=True))),
            )

        f.loop(row0, row1, 1, [], row)

    def scratch(self) -> str:
        """Where the scratch of the worker starts: with a pixel of padding, in whole vectors of 64."""
        return self.f.offset(self.w.scratch, self.f.mul("%worker", self.w.scratch_stride))

    def bias(self) -> str:
        """The address of the biases."""
        return FinishArguments.load(self.f, "bias", self.finishing)

    def minus(self, lanes: int) -> str:
        """What the sums of the weights are multiplied by: the zero point, negated."""
        f = self.f
        shift = f.cast("sext" if self.signed else "zext", self.fill, "i32", "i8")
        return f.splat(f.sub(0, shift, "i32"), lanes, "i32")

    def lines(self, x: str, padding: str, oy: str) -> list[tuple[str, str]]:
        """For each row of a window that starts in column 0: its first pixel, and the step from pixel to pixel.

        A row outside the image is one pixel of padding, over and over.
        """
        f, w = self.f, self.w
        y0 = f.sub(f.mul(oy, w.stride_h), w.pad_h)
        found = []
        for k in range(self.kernel[0]):
            y = f.add(y0, f.mul(w.dilation_h, k))
            inside = f.cmp("ult", y, w.height)
            step = f.select(inside, w.x_w, 0)
            p = f.select(inside, f.offset(x, f.mul(y, w.x_h)), padding, "ptr")
            found.append((f.offset(p, f.sub(0, f.mul(w.pad_w, step))), step))
        return found

    def place(self, pixels: Pixels, c: str) -> tuple[str, str]:
        """Where the results of the first pixel go, from channel c on, and the step to those of the next."""
        f, w = self.f, self.w
        number = f.add(pixels.row, pixels.ox)
        return f.offset(w.out, f.add(f.mul(number, w.out_step), c)), w.out_step

    def columns(self, pixels: Pixels, c: str) -> Iterator[tuple[list[str], list[tuple[int, int]]]]:
        """For each column of the image under these pixels: where the rows of windows are, from channel c on, and users.

        A user is a pixel and the column of its window.
        """
        f, w = self.f, self.w
        users: dict[int, list[tuple[int, int]]] = {}
        for r in range(pixels.count):
            for j in range(self.kernel[1]):
                users.setdefault(r * self.stride + j * self.dilation, []).append((r, j))
        at = [f.offset(p, c) for p, _ in pixels.places]
        padding = f.offset(pixels.padding, c)
        before = 0
        for column in sorted(users):
            if column > before:
                steps = (step for _, step in pixels.places)
                at = [f.offset(p, f.mul(step, column - before)) for p, step in zip(at, steps, strict=True)]
            before = column
            if pixels.edge:
                there = f.add(f.sub(f.mul(pixels.ox, w.stride_w), w.pad_w), column)
                inside = f.cmp("ult", there, w.width)
                yield [f.select(inside, p, padding, "ptr") for p in at], users[column]
            else:
                yield at, users[column]
