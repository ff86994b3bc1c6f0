"""The general run: into arrays of the caller, of some outputs, with large results; and what makes the next one fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.native.runner_ir import VALUE
from rlx.backends.cpu.runtime.results import DIRECT, WRITTEN_OUT, check_apart, overlaps
from rlx.backends.cpu.runtime.selected_outputs import Selected, selected
from rlx.errors import ShapeError
from rlx.ir.graph import Array
from rlx.ir.shape import numel, symbols
from rlx.kernels.program import Buffer

if TYPE_CHECKING:
    from rlx.backends.cpu.runtime.binding import Bound
    from rlx.backends.cpu.runtime.executable import CpuExecutable

__all__ = ["rebound", "run", "run_direct"]

KEPT_SELECTED = 64  # sets of outputs for each binding
Targets = Sequence[Array | None]


def run(executable: CpuExecutable, inputs: Sequence[Array], out: Targets, wanted: Sequence[int]) -> list[Array]:
    """See `Executable.run`."""
    program = executable.program
    with executable.held():
        used = [("arena", executable.memory), ("arena", executable.scratch), *executable.states.named()]
        check_apart(program.outputs, out, used)
        ready = executable.compact(inputs)
        bound = executable.bind(ready)
        arrays = executable.made(bound)
        if not program.made:
            check_shapes(executable, out, arrays, "needs")
        asked = union(wanted, out)
        given = [target is not None for target in out]
        executable.result_bytes = sum(array.nbytes for array in arrays)
        if executable.result_bytes >= DIRECT and not program.made and not executable.grows:
            executable.fresh.keep_for(arrays)
            pairs = enumerate(zip(out, arrays, strict=True))
            out = [executable.fresh.like(a) if t is None and n in asked else t for n, (t, a) in pairs]
        direct = outputs_in_place(executable, ready, out) if any(t is not None for t in out) else {}
        # where data decide sizes, runs set the counts of chunks in the one table themselves
        table = bound.table if program.made else prepared(executable, bound, asked).table
        with pointed(executable, bound, direct), executable.block.walking(table):
            bound = executable.execute(bound, ready)
        results = list(executable.made(bound))
        check_shapes(executable, out, results, "gave")
        for number, (target, (_, buffer)) in enumerate(zip(out, program.outputs, strict=True)):
            if target is not None and buffer.base not in direct:
                target[...] = results[number]
            elif target is not None:
                results[number] = target
        if direct or len({*asked}) < len(results):
            fresh = {id(t) for t, own in zip(out, given, strict=True) if t is not None and not own}
            kept = (executable.fresh.twin(a) if id(a) in fresh else a for a in results)
            executable.written = tuple(array if n in asked else None for n, array in enumerate(kept))
            executable.block.words[VALUE] = WRITTEN_OUT
        return [t if (t := out[i]) is not None else results[i].copy() for i in wanted]


def check_shapes(executable: CpuExecutable, out: Targets, arrays: Sequence[Array], verb: str) -> None:
    """Raises `ShapeError` for an array of `out` that is not as those of the run."""
    for target, array, (name, _) in zip(out, arrays, executable.program.outputs, strict=True):
        if target is not None and target.shape != array.shape:
            raise ShapeError(f"out for {name!r}: this run {verb} shape {array.shape}, got {target.shape}")


def outputs_in_place(executable: CpuExecutable, inputs: Sequence[Array], out: Targets) -> dict[Buffer, Array]:
    """The outputs that are made in the caller's arrays: where these are compact, and apart from inputs and others.

    An output that is part of a buffer, shown twice or used by a host call is copied instead.
    """
    found: dict[Buffer, Array] = {}
    given = [o for o in out if o is not None]
    for target, (_, buffer) in zip(out, executable.program.outputs, strict=True):
        fixed = all(s.name not in executable.program.made for size in buffer.shape for s in symbols(size))
        if target is None or executable.grows or not fixed:
            continue
        if not is_moved(executable, buffer) or executable.states.address(buffer.base) is not None:
            continue
        others = [*inputs, *(o for o in given if o is not target)]
        if target.flags.c_contiguous and target.flags.aligned and not overlaps(target, others):
            found[buffer.base] = target
    return found


@contextmanager
def pointed(executable: CpuExecutable, bound: Bound, direct: Mapping[Buffer, Array]) -> Iterator[None]:
    """Runs inside this make these buffers in arrays of the caller."""
    try:
        for root, target in direct.items():
            bound.binding.point(root, int(target.ctypes.data))
        yield
    finally:
        for root in direct:
            bound.binding.point(root, executable.address(root))


def union(wanted: Sequence[int], out: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of outputs that are wanted, and of those that `out` gives an array for."""
    more = [number for number, target in enumerate(out) if target is not None and number not in wanted]
    return (*wanted, *more)


def rebound(
    executable: CpuExecutable, inputs: Sequence[Any], wanted: Sequence[int], out: Sequence[Any], tried: Selected | None
) -> Selected | None:
    """Binds to the shapes of these inputs, if there was a run with them, and prepares for what is wanted.

    None if neither changes what was tried before, or only a general run can do it.
    """
    if executable.program.made or executable.bound is None:
        return None
    admitted = executable.admit(inputs)
    with executable.held():
        before = executable.shapes
        bound = executable.bind(executable.compact(admitted))
        executable.result_bytes = sum(array.nbytes for array in executable.made(bound))
        if bound.fresh or executable.result_bytes >= DIRECT:
            return None
        made = prepared(executable, bound, union(wanted, out))
        return None if made is tried and before == executable.shapes else made


def run_direct(executable: CpuExecutable, inputs: Sequence[Any], out: Targets | None) -> list[Array] | None:
    """A run by the entry that writes large results into new arrays, or those of `out`; None where it can't."""
    bound = executable.bound
    if bound is None or bound.fresh:
        return None
    given = [] if out is None else [t for t in out if isinstance(t, np.ndarray) and not overlaps(t, inputs)]
    if out is not None and len(given) < len(out):
        return None
    if bound.direct is None:
        with executable.held():
            bound.direct = moving(executable, bound)
    if not bound.direct:
        return None
    made = given or [executable.fresh.like(array) for array in executable.made(bound)]
    if executable.run_selected(bound.direct, *inputs, *made) is not True:
        return None
    executable.written = tuple(given or map(executable.fresh.twin, made))
    return made


def moving(executable: CpuExecutable, bound: Bound) -> Selected | int:
    """What runs of this binding need that write results where the caller gets them; 0 where none can be moved."""
    if executable.program.made:
        return 0
    patches, base = [], int(bound.binding.words.ctypes.data)
    for number, (_, buffer) in enumerate(executable.program.outputs):
        root = buffer.base
        if is_moved(executable, buffer):
            own, places = executable.address(root), bound.binding.places.get(root, {})
            patches += [(number, base + 8 * word, shift, own + shift) for word, shift in places.items()]
    if not patches:
        return 0
    arrays, used = executable.made(bound), [executable.memory, executable.scratch]
    executable.fresh.keep_for(arrays)
    return selected(bound.table, bound.table, executable.every, arrays, used, patches)


def is_moved(executable: CpuExecutable, buffer: Buffer) -> bool:
    """Whether a run can write an output elsewhere than in the arena: all of its memory, in other axes or not."""
    root = buffer.base
    whole = buffer.offset == 0 and buffer.dtype.bits == root.dtype.bits and numel(buffer.shape) == numel(root.shape)
    return root.kind == "arena" and (buffer is root or whole) and executable.is_movable(root)


def prepared(executable: CpuExecutable, bound: Bound, asked: tuple[int, ...]) -> Selected:
    """What runs of this binding need that make the outputs with these numbers."""
    made = bound.selected.get(asked)
    if made is None:
        fed = {feed.number for feed in executable.states.feeds.values()}
        table = executable.selection.table(bound.table, {*asked, *fed})
        used = [executable.memory, executable.scratch, *(memory for _, memory in executable.states.named())]
        made = selected(bound.table, table, asked, executable.made(bound), used)
        if len(bound.selected) >= KEPT_SELECTED:  # the last run may have been by one of them
            del bound.selected[next(key for key, old in bound.selected.items() if old != executable.block.value)]
        bound.selected[asked] = made
    return made
