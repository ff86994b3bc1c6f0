"""Which experts' panels lie in memory; a run that goes to another packs its matrix from where that is.

Where that is a mapped file, nothing of them is held. Weights that a caller gave have no file: their matrices are kept
in memory, in the type that they had.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.arithmetic import usual_arithmetic
from rlx.backends.cpu.runtime.binding import aligned_bytes
from rlx.ir.graph import Array
from rlx.ir.mapped import mapping_of
from rlx.kernels.experts import ExpertWeight
from rlx.kernels.program import Buffer, Program

__all__ = ["Mask", "Residency", "matrix_bytes", "panel_bytes"]

Mask = np.ndarray[Any, np.dtype[np.bool_]]  # numpy.typing takes a millisecond to load
PACK = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int64] * 6)


class Residency:
    """The masks of weights some of whose experts have no panels, and the matrices of these that lie in no file.

    `addresses` has the routines that make panels.
    """

    def __init__(self, program: Program, addresses: Mapping[str, int]) -> None:
        self.weights = {weight.panels: weight for layer in program.experts for weight in layer.weights}
        self.addresses = addresses
        self.masks: dict[Buffer, Mask] = {}
        self.matrices: dict[Buffer, dict[int, Array]] = {}

    def copy(self) -> Residency:
        """The same, which can then be changed apart."""
        made = Residency.__new__(Residency)
        made.weights, made.addresses = self.weights, self.addresses
        made.masks, made.matrices = dict(self.masks), dict(self.matrices)
        return made

    def mask(self, weight: ExpertWeight) -> Mask:
        """Which of the experts have panels."""
        experts = weight.panels.shape[0]
        assert isinstance(experts, int)
        return self.masks.get(weight.panels, np.ones(experts, np.bool_))

    def sources(self, params: Mapping[Buffer, Array]) -> set[Buffer]:
        """The params in mapped files, which runs may read experts from: letting go of them gives nothing back."""
        roots = {weight.source.base for weight in self.weights.values()}
        return {root for root in roots if root in params and mapping_of(params[root]) is not None}

    def kept_bytes(self) -> int:
        """Bytes of panels and matrices that the masked weights have in memory."""
        panels = sum(int(mask.sum()) * panel_bytes(self.weights[b]) for b, mask in self.masks.items())
        return panels + sum(m.nbytes for matrices in self.matrices.values() for m in matrices.values())

    def saved_bytes(self) -> int:
        """How much less that is than with all panels."""
        return sum(len(m) * panel_bytes(self.weights[b]) for b, m in self.masks.items()) - self.kept_bytes()

    @usual_arithmetic()
    def place(
        self, weight: ExpertWeight, wanted: Mask, panels: Array | None, whole: Array | None, stays: bool
    ) -> Array:
        """The panels of the wanted experts, in memory of their own, for a weight that has these (None: none yet).

        `whole` is the weight where it is still there, and `stays` whether it will be.
        """
        before, size = self.mask(weight), panel_bytes(weight)
        held = self.matrices.get(weight.panels, {}) if panels is not None else {}
        places = np.cumsum(before) - 1

        def packed(expert: int) -> Array | None:
            at = int(places[expert])
            return panels[at * size : (at + 1) * size] if panels is not None and before[expert] else None

        made, matrices, own = aligned_bytes(max(int(wanted.sum()) * size, 8)), {}, 0
        for expert, resident in enumerate(wanted):
            panel = packed(expert)
            source = held.get(expert) if whole is None else whole[expert]
            if resident:
                target = made[own * size : (own + 1) * size]
                own += 1
                if panel is not None:
                    target[...] = panel
                else:
                    assert source is not None
                    self._pack(weight, source, target)
            elif not stays:
                if source is None:
                    assert panel is not None
                    source = self._unpacked(weight, panel)
                matrices[expert] = source if expert in held else np.array(source, order="C")
        if wanted.all():
            self.masks.pop(weight.panels, None)
            self.matrices.pop(weight.panels, None)
        else:
            self.masks[weight.panels], self.matrices[weight.panels] = wanted, matrices
        return made

    def _pack(self, weight: ExpertWeight, source: Array, target: Array) -> None:
        """By the routine that runs use, so that the bits are the same; some encoded ones are their own panels."""
        if not weight.routine:
            target[...] = source
            return
        shape = weight.panels.shape
        count, depth = int(shape[1]), int(shape[2])
        encoding = weight.source.base.encoding
        if encoding is not None:
            depth *= encoding.block
            columns = source.size // (depth // encoding.block * encoding.block_bytes)
        else:
            columns = source.shape[0 if weight.transposed else 1]
        strides = (1, depth) if weight.transposed else (columns, 1)
        function: Any = PACK(self.addresses[weight.routine])
        function(source.ctypes.data, target.ctypes.data, depth, columns, *strides, count, 0)

    def _unpacked(self, weight: ExpertWeight, panel: Array) -> Array:
        """The matrix that panels were made of: all of it is in them."""
        if not weight.routine:
            return panel
        if weight.source.base.encoding is None:
            return _from_numbers(weight, panel)
        count, blocks, size, width = (int(n) for n in weight.panels.shape[1:])
        places, order, flipped = self._bits(weight)
        made = np.empty((count * width, blocks, size), np.uint8)
        for number, own in enumerate(panel.reshape(count, blocks, -1)):  # one by one: bits take eight times the memory
            columns = own[:, places].swapaxes(0, 1)
            if order is not None:
                bits = np.unpackbits(np.bitwise_xor(columns, flipped), axis=-1)
                columns = np.packbits(bits[..., order], axis=-1)
            made[number * width : (number + 1) * width] = columns
        return made.reshape(-1)[: int(weight.source.shape[1])]

    def _bits(self, weight: ExpertWeight) -> tuple[Array, Array | None, Array]:
        """Where a block of panels has the bytes of each of its columns; in what order their bits, and which flipped.

        Panels hold all bits of the blocks, some in other places. The routine that packs shows where it puts a block of
        zeros, columns of ones, and single bits; no order where bytes are as they are stored.
        """
        size, width = (int(n) for n in weight.panels.shape[3:])

        def packed(columns: Array) -> Array:
            made = np.zeros((-(-len(columns) // width), size * width), np.uint8)
            depth = weight.source.base.encoding.block  # type: ignore[union-attr]
            function: Any = PACK(self.addresses[weight.routine])
            function(columns.ctypes.data, made.ctypes.data, depth, len(columns), 1, depth, len(made), 0)
            return made

        zeros = packed(np.zeros((width, size), np.uint8))[0]
        ones = [
            packed(column)[0] for column in np.eye(width, dtype=np.uint8)[:, :, None] * np.full(size, 255, np.uint8)
        ]
        places = np.array([np.flatnonzero(one != zeros) for one in ones])
        flipped = zeros[places[0]]
        single = np.packbits(np.eye(8 * size, dtype=np.uint8), axis=-1)
        moved = packed(single)[:, places].reshape(-1, size)[: 8 * size] ^ flipped
        order = np.unpackbits(moved, axis=-1).argmax(axis=-1)
        plain = not flipped.any() and np.array_equal(order, np.arange(8 * size))
        return places, None if plain else order, flipped


def panel_bytes(weight: ExpertWeight) -> int:
    """Bytes of the panels of one expert."""
    return _share(weight.panels)


def matrix_bytes(weight: ExpertWeight) -> int:
    """Bytes of one expert's matrix as it is stored: what a run reads that has no panels of it."""
    return _share(weight.source)


def _share(buffer: Buffer) -> int:
    """Bytes of what one expert has in a buffer of all experts."""
    experts, total = buffer.shape[0], buffer.nbytes({})
    assert isinstance(experts, int)
    return total // max(experts, 1)


def _from_numbers(weight: ExpertWeight, panel: Array) -> Array:
    """The matrix that panels of numbers [count, depth, width] were made of: each element of it is exact in them."""
    count, depth, width = (int(size) for size in weight.panels.shape[1:])
    wide = panel.view(weight.panels.dtype.numpy).reshape(count, depth, width).swapaxes(0, 1).reshape(depth, -1)
    columns = int(weight.source.shape[1 if weight.transposed else 2])
    matrix = wide[:, :columns].T if weight.transposed else wide[:, :columns]
    return np.ascontiguousarray(matrix, weight.source.dtype.numpy)
