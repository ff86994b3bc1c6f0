"""Inputs for a model: read from files, or made up where none are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlx.backends.base import spec_of
from rlx.cli.options import Filled, InputSpec
from rlx.errors import OptionError, RlxError, ShapeError, no_such
from rlx.install import install_extra
from rlx.ir.dtype import DType
from rlx.ir.extents import bind_extents
from rlx.ir.graph import Array, Graph
from rlx.ir.shape import Dim, Guard, Size, Symbol, evaluate, symbols
from rlx.ir.value import Value
from rlx.records import dataclass, replace
from rlx.runtime.archives import npy_array, open_archive, read_npy
from rlx.runtime.arrays import to_array

__all__ = ["Inputs", "gather_inputs", "with_hint"]

USUAL = 16  # extent of an open dim that is not the first axis
USUAL_IMAGE = 64  # the same for the axes of images and volumes (rank 4 and above, from the third on)
LONGEST = 1 << 17  # an extent that is tried where smaller ones do not fit the model, as for audio
Wish = tuple[Size, Size | None]  # two sizes that have to be equal, or one that has to be positive


@dataclass
class Inputs:
    """Arrays by input name, the extents of the dims, and what of both was assumed."""

    arrays: dict[str, Array]
    extents: dict[str, int]
    sizes: list[str]
    data: list[str]

    @property
    def notes(self) -> list[str]:
        """All that was assumed, one line each."""
        return [*self.sizes, *self.data]


def gather_inputs(graph: Graph, given: Sequence[tuple[str, InputSpec]], seed: int) -> Inputs:
    """An array for every input: the file, the value or the shape given for it, else an assumed one.

    Random data are standard normal floats, integers 0 and 1 (fit for masks, types and ids alike), and bools. Raises
    `NameNotFound`, `OptionError` (a file that can't be read), and what does not fit the shape of an input.
    """
    given, arrays = _without_archives(given)
    specs = dict(given)
    names = [v.name for v in graph.inputs]
    for name in (*arrays, *specs):
        if name not in names:
            raise no_such("input", name, names)
    twice = next((name for i, (name, _) in enumerate(given) if name in arrays or name in dict(given[:i])), None)
    if twice is not None:
        raise OptionError(f"input {twice!r} is given twice")
    by_name = {v.name: v for v in graph.inputs}
    data = []
    for name, path in specs.items():
        if isinstance(path, Path) and path.suffix.lower() == ".npy":
            arrays[name] = read_array(path)
        elif isinstance(path, Path):
            arrays[name], note = read_picture(path, by_name[name])
            data.append(note)
    arrays |= {name: filled_array(by_name[name], given) for name, given in specs.items() if isinstance(given, Filled)}
    shapes = {name: a.shape for name, a in arrays.items()} | {
        name: shape for name, shape in specs.items() if isinstance(shape, tuple)
    }
    for name, shape in shapes.items():
        if len(shape) == 1 and name not in arrays and not by_name[name].rank:
            raise ShapeError(f"input {name!r} is a scalar: for the value {shape[0]} give {name}=scalar:{shape[0]}")
    extents = bind_extents(graph, shapes)
    assumed = assume_extents(graph, extents)
    extents |= assumed
    rng = np.random.default_rng(seed)
    for value in graph.inputs:
        if value.name not in arrays:
            shape = shapes.get(value.name) or tuple(evaluate(s, extents) for s in value.shape)
            try:
                arrays[value.name] = random_array(rng, shape, value.dtype)
            except (MemoryError, ValueError) as error:
                raise OptionError(f"input {value.name!r}: {error or 'out of memory'}; give a smaller shape") from None
            data.append(f"{value.name}: random {value.dtype}[{', '.join(map(str, shape))}], seed {seed}")
    sizes = [f"{name} = {extent}" for name, extent in assumed.items()]
    return Inputs({name: arrays[name] for name in names}, extents, sizes, data)


def _without_archives(
    given: Sequence[tuple[str, InputSpec]],
) -> tuple[list[tuple[str, InputSpec]], dict[str, Array]]:
    """The inputs that are given one by one, and the arrays of npz files."""
    arrays: dict[str, Array] = {}
    for name, path in given:
        if not name and isinstance(path, Path):
            with open_archive(path, "is not a whole .npz file of numbers") as bundle:
                arrays |= {entry.removesuffix(".npy"): npy_array(bundle, entry) for entry in bundle.namelist()}
    return [(name, spec) for name, spec in given if name], arrays


def read_picture(path: Path, value: Value) -> tuple[Array, str]:
    """A picture as an input [1, 1 or 3, height, width], or channels last, of u8 or floats from 0 to 1; and a note."""
    try:
        from PIL import Image
    except ImportError:
        raise OptionError(f"--input {path}: pictures are read by Pillow: {install_extra('image')}") from None
    axis = next((a for a in (1, 3) if value.rank == 4 and value.shape[a] in (1, 3)), None)
    if axis is None or not (value.dtype.is_float or value.dtype.name == "u8"):
        wanted = "[n, 3, height, width], 1 channel or channels last, of u8 or floats"
        raise OptionError(f"--input {path}: input {value.name!r} is {value.type}; pictures are for {wanted}")
    try:
        with Image.open(path) as file:
            image = file.convert("L" if value.shape[axis] == 1 else "RGB")
            height, width = value.shape[2:] if axis == 1 else value.shape[1:3]
            size = (
                width if isinstance(width, int) else image.width,
                height if isinstance(height, int) else image.height,
            )
            pixels = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OptionError(f"--input {path}: can't be read as a picture: {error}") from None
    array = pixels.reshape(1, *pixels.shape[:2], -1)
    array = np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if axis == 1 else array
    scaled = value.dtype.is_float
    made = (array / np.float32(255)).astype(value.dtype.numpy) if scaled else array
    return made, f"{value.name}: {path.name} at {size[0]}x{size[1]}, {'values 0 to 1' if scaled else 'bytes'}"


def read_array(path: Path, option: str = "--input") -> Array:
    """An array from a .npy file; pickled objects are refused."""
    try:
        return read_npy(path)
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror or error}") from None
    except MemoryError as error:
        raise OptionError(f"{option} {path}: {error}") from None
    except (ValueError, EOFError) as error:
        raise OptionError(
            f"{option} {path}: not a .npy file of numbers, or not whole: {error}; give one .npy file for each input"
        ) from None


def filled_array(value: Value, given: Filled) -> Array:
    """An array of the input's element type with the value everywhere; raises `DTypeError` where it is none of these."""
    element = to_array(replace(spec_of(value), shape=()), given.value, f"input {value.name!r}")
    try:
        return np.full(given.shape, element)
    except (MemoryError, ValueError) as error:
        raise OptionError(f"input {value.name!r}: {error or 'out of memory'}; give a smaller shape") from None


def assume_extents(graph: Graph, known: Mapping[str, int]) -> dict[str, int]:
    """An extent for each open dim of the inputs: 1 along a first axis, else a usual size within the bounds.

    Sizes that the model's guards, or windows longer than the data, rule out are set to what is asked for or doubled.
    """
    chosen: dict[str, int] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape):
            wanted = 1 if axis == 0 and value.rank > 1 else USUAL_IMAGE if value.rank > 3 and axis > 1 else USUAL
            for symbol in symbols(size) if isinstance(size, Dim) else ():
                if symbol.name not in known and symbol.name not in chosen:
                    chosen[symbol.name] = within(symbol, wanted)
    equal: list[Wish] = [(g.lhs, g.rhs) for g in _guards(graph)]
    positive = dict.fromkeys(s for node in graph.nodes for v in node.outputs for s in v.shape if isinstance(s, Dim))
    wishes = [*equal, *((size, None) for size in positive)]
    dims = graph.dims()
    return _fitted(wishes, dims, known, chosen) or _fitted(equal, dims, known, chosen) or chosen


def _fitted(
    wishes: Sequence[Wish], dims: Mapping[str, Symbol], known: Mapping[str, int], chosen: Mapping[str, int]
) -> dict[str, int] | None:
    """The chosen extents, changed until all wishes come true; None if they can't."""
    chosen = dict(chosen)
    for _ in range(64):
        extents = {**known, **chosen}
        unmet = next((wish for wish in wishes if _fails(*wish, extents)), None)
        if unmet is None:
            return chosen
        if not _change(unmet, dims, extents, chosen):
            return None
    return None


def _guards(graph: Graph) -> Iterator[Guard]:
    yield from graph.guards
    for node in graph.nodes:
        for region in node.regions:
            yield from _guards(region)


def _fails(size: Size, other: Size | None, extents: Mapping[str, int]) -> bool:
    """Whether two sizes differ, or one is not positive; sizes that data decide pass."""
    if any(s.name not in extents for s in (*symbols(size), *symbols(0 if other is None else other))):
        return False
    found = evaluate(size, extents)
    return found < 1 if other is None else found != evaluate(other, extents)


def _change(unmet: Wish, dims: Mapping[str, Symbol], extents: Mapping[str, int], chosen: dict[str, int]) -> bool:
    """Sets a size that has to be equal to another to it, else doubles what has been chosen; False if neither can be."""
    used = [s.name for size in unmet for s in symbols(0 if size is None else size)]
    for side, other in (unmet, unmet[::-1]):
        symbol = side.symbol if isinstance(side, Dim) else None
        if symbol is None or other is None or used.count(symbol.name) > 1 or symbol.name not in chosen:
            continue
        if within(symbol, evaluate(other, extents)) == evaluate(other, extents):
            chosen[symbol.name] = evaluate(other, extents)
            return True
    grown = {name: within(dims[name], chosen[name] * 2) for name in used if name in chosen}
    grown = {name: extent for name, extent in grown.items() if chosen[name] < extent <= LONGEST}
    chosen.update(grown)
    return bool(grown)


def within(symbol: Symbol, wanted: int) -> int:
    """The size nearest to the wanted one that the symbol's bounds and multiple allow."""
    step = symbol.multiple
    lowest = -(-symbol.lo // step) * step
    highest = None if symbol.hi is None else symbol.hi // step * step
    size = max(lowest, -(-wanted // step) * step)
    return size if highest is None else min(size, highest)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Random elements: standard normal, 0 and 1, or bools."""
    if dtype.kind == "s":
        words = ("one", "Two", "three", "4", "")
        return np.array(words, dtype.numpy)[rng.integers(0, len(words), shape)]
    if dtype.kind in "fc":
        return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy)
    return np.asarray(rng.integers(0, 2, shape)).astype(dtype.numpy)


def with_hint(error: RlxError, inputs: Inputs) -> RlxError:
    """The error, with a word on assumed sizes where they may be to blame."""
    if inputs.sizes:
        made = ", ".join(inputs.sizes)
        hint = f"the sizes {made} were assumed; give others with --input NAME=SHAPE or --dims NAME=SIZE"
        error.args = (f"{error} ({hint})", *error.args[1:])
    return error
