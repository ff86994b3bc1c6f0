"""Products by groups of rows: rows are sorted by their expert, and each expert's rows are one matrix product.

Weights are packed as those of any product, expert by expert. Where one expert's panels are not there, those that a
chunk needs are packed into its scratch memory: the same code on the same numbers, so the result has the same bits.

Encoded weights take no more memory than their blocks. Where these lie along the depth, panels are made of blocks
(`grouped_panels`), which products decode in registers. Others are copied as they are stored, and each chunk decodes
the panels that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from rlx.backends.cpu.gemm import kernel as gemm
from rlx.backends.cpu.gemm.chunk import row_parts
from rlx.backends.cpu.gemm.panels import q8_rows
from rlx.backends.cpu.gemm.panels.operands import DEPTH
from rlx.backends.cpu.gemm.panels.q8 import SPEED
from rlx.backends.cpu.gemm.tile import tile_of
from rlx.backends.cpu.kernels.frame import Frame
from rlx.backends.cpu.kernels.grouped_panels import computed_in, pack_routine, panels_of
from rlx.backends.cpu.llvm import convert
from rlx.backends.cpu.llvm.builder import Function, Typed, vec
from rlx.backends.cpu.loops.nest import emit_nest
from rlx.backends.cpu.schedule.arguments import KernelCode, Part, once, part
from rlx.backends.cpu.schedule.grouped_matmul import ROWS, GroupedMatmulSchedule
from rlx.backends.cpu.schedule.matmul import COPY_PAD, PRODUCT_BLOCK
from rlx.backends.cpu.schedule.routing import CALLS, CAPACITY, RING, SLOTS, STATS
from rlx.backends.cpu.strategy import Setting, Step
from rlx.backends.cpu.target import Target
from rlx.ir.casting import rounded_q8_element
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.encoding import Encoding
from rlx.ir.graph import Node
from rlx.ir.shape import Size, ceildiv, same, size_product
from rlx.kernels.encoded import bytes_of
from rlx.kernels.experts import ExpertLayer, ExpertWeight
from rlx.kernels.expr import Load, const
from rlx.kernels.lowering import Contract, Lowering, out_vars
from rlx.kernels.program import Buffer, Kernel, Program, Store
from rlx.ops.experts import GroupedMatMul
from rlx.records import replace

__all__ = ["accepts", "find_layers", "layout"]

F32, F64, I64 = DTYPES["f32"], DTYPES["f64"], DTYPES["i64"]
GROUPS = 1  # where the groups (expert, first row, rows) start, after their number


def accepts(node: Node) -> bool:
    """Floats from 16 bits on."""
    dtype = node.inputs[0].dtype
    return dtype.name in convert.LLVM and dtype.bits >= 16


def sizes(w: Buffer, transposed: bool) -> tuple[Size, Size, Size]:
    """Experts, depth and columns of a weight."""
    number, first, second = w.shape
    return (number, second, first) if transposed else (number, first, second)


def encoding_of(node: Node) -> Encoding | None:
    """That of the weights of a product."""
    return node.inputs[1].type.encoding


def blocks_of(w: Buffer) -> Buffer:
    """Encoded weights as bytes: a row for each expert."""
    experts = int(w.shape[0])
    return replace(bytes_of(w), shape=(experts, w.nbytes({}) // max(experts, 1)))


def layout(kernel: Kernel, setting: Setting) -> list[Kernel]:
    """The rows are grouped first; weights that no run changes are packed in `prepare`."""
    assert kernel.special is not None
    op = kernel.special.op
    assert isinstance(op, GroupedMatMul)
    x, w, experts = kernel.operands
    (out,), node, nodes = kernel.results, kernel.special, kernel.nodes
    number, depth, columns = sizes_of(node)
    groups = Buffer(f"{out.name}.groups", out.kind, (GROUPS + 4 * number + size_product(experts.shape),), I64)
    made: list[Kernel] = []
    if w.encoding is not None:
        w = blocks_of(w)
    if op.activations:
        x, rounding = _rounded(node, x, out, setting.target)
        made.append(rounding)
    read, tables = [x, groups, w], []
    static = w.is_fixed and all(isinstance(s, int) for s in w.shape)
    if static and out.kind != "prepared":
        dtype, shape = w.dtype, w.shape
        found = panels_of(node, setting.target)
        if found is not None:
            shape = found.shape(number, depth, columns)
        elif encoding_of(node) is None:
            dtype = computed_in(w.dtype)
            width = tile_of(computed_in(dtype), setting.target).width
            shape = (number, ceildiv(columns, width), depth, width)
        panels = Buffer(f"{out.name}.panels", "prepared", shape, dtype)
        made.append(Kernel("pack experts", special=node, operands=(w,), results=(panels,), nodes=nodes, strategy=PACK))
        table = Buffer(f"{out.name}.table", "table", (2 * number,), I64)
        block = Buffer(f"{out.name}.block", "table", (STATS + 3 * number,), I64)
        read, tables = [x, groups, panels, table], [block, table]
    operands = (experts, *tables)
    made.append(Kernel("group rows", special=node, operands=operands, results=(groups,), nodes=nodes, strategy=GROUP))
    made.append(replace(kernel, operands=tuple(read), strategy=PRODUCT))
    return made


def _rounded(node: Node, x: Buffer, out: Buffer, target: Target) -> tuple[Buffer, Kernel]:
    """The rows of x rounded to 8 bits, records where panels are multiplied by such, and the kernel that makes them."""
    kernel = Kernel("round a", nodes=(node,))
    found = panels_of(node, target)
    if found is not None and found.rounded:
        rows, row = size_product(x.shape[:-1]), out_vars(2)[0]
        flat = Load(x.view((rows, x.shape[-1]), x.dtype), (row, DEPTH), x.dtype)
        anchor = Contract(rows, 1, x.shape[-1], flat, const(0, F32))
        result = Store(replace(out, shape=(rows, 1)), (rows, 1), out_vars(2), const(0, F32))
        records, kernel = q8_rows.ROUND.rows(replace(kernel, stores=(result,), anchor=anchor), anchor, const(0, I64))
        assert isinstance(records, Load)
        return records.source, kernel
    made = Buffer(f"{out.name}.q8", out.kind, x.shape, x.dtype)
    own = out_vars(len(x.shape))
    element = rounded_q8_element(Lowering(()), lambda at: Load(x, (*own[:-1], at), x.dtype), x.shape[-1], own[-1])
    return made, replace(kernel, stores=(Store(made, x.shape, own, element),))


def find_layers(program: Program, target: Target) -> None:
    """Products that go by the same numbers are one layer, whose rows are grouped once."""
    packs = {kernel.results[0]: kernel for kernel in program.prepare if kernel.strategy is PACK}
    first: dict[tuple[Buffer, Size], Kernel] = {}
    layers: dict[Buffer, ExpertLayer] = {}  # by the groups of its rows
    same_as: dict[Buffer, Buffer] = {}
    run: list[Kernel] = []
    for kernel in program.run:
        if kernel.mark is not None:
            first.clear()  # what a branch has grouped may not be there after it
        if kernel.strategy is GROUP:
            (groups,), numbers = kernel.results, kernel.operands[0]
            earlier = first.setdefault((numbers, groups.shape[0]), kernel)
            if earlier is not kernel and numbers.base.kind != "state" and len(earlier.operands) == len(kernel.operands):
                same_as[groups] = earlier.results[0]
                continue
        elif kernel.strategy is PRODUCT:
            x, groups, *weights = kernel.operands
            groups = same_as.get(groups, groups)
            kernel = replace(kernel, operands=(x, groups, *weights))
            if len(weights) == 2:
                layer = layers.get(groups)
                if layer is None:
                    layer = layers[groups] = _layer(next(k for k in run if groups in k.results), layers.values())
                layer.weights.append(_weight(packs[weights[0]], weights[1], target))
        run.append(kernel)
    program.run = run
    program.experts = list(layers.values())


def _layer(grouping: Kernel, others: Iterable[ExpertLayer]) -> ExpertLayer:
    """The layer of these groups, named by where its numbers come from."""
    numbers, block, _ = grouping.operands
    node = grouping.special
    assert node is not None
    last = numbers.shape[-1]
    top_k = last if len(numbers.shape) > 1 and isinstance(last, int) else 1
    experts = (int(block.shape[0]) - STATS) // 3
    source, rows = node.inputs[2], size_product(numbers.shape)
    name = source.node.provenance[0] if source.node is not None and source.node.provenance else source.name or "moe"
    taken = {layer.name for layer in others}
    free = (f"{name}.{i}" for i in count(1))
    unique = name if name not in taken else next(n for n in free if n not in taken)
    return ExpertLayer(unique, experts, top_k, rows, block, [])


def _weight(pack: Kernel, table: Buffer, target: Target) -> ExpertWeight:
    assert pack.special is not None
    op = pack.special.op
    assert isinstance(op, GroupedMatMul)
    (source,), (panels,) = pack.operands, pack.results
    found = panels_of(pack.special, target)
    if found is not None:
        packs = found.routine(target).symbol
    else:
        packs = "" if encoding_of(pack.special) is not None else pack_routine(source.dtype, target).symbol
    return ExpertWeight(source.base.name, source, panels, table, op.transposed, packs)


# ---- grouping


def _group(kernel: Kernel, target: Target) -> KernelCode:
    """A counting sort, which keeps the order of the rows of an expert."""
    frame = Frame()
    f, (numbers, *tables), (groups,) = frame.f, kernel.operands, kernel.results
    rows = frame.product(numbers.shape)
    experts = frame.size((groups.shape[0] - GROUPS - size_product(numbers.shape)) // 4)
    base, ids, ty = frame.pointer(groups), frame.pointer(numbers), f"i{numbers.dtype.bits}"
    listed = f.gep(base, GROUPS, "i64")
    cursor = f.gep(listed, f.mul(experts, 3, "i64"), "i64")
    order = f.gep(cursor, experts, "i64")

    def number(row: str) -> str:
        raw = frame.element(ids, row, ty)
        return raw if ty == "i64" else f.cast("sext" if numbers.dtype.kind == "i" else "zext", raw, "i64", ty)

    def clear(e: str, _: list[str]) -> None:
        frame.put(0, cursor, e, "i64")

    def tally(row: str, _: list[str]) -> None:
        expert = f.max(frame.axis_index(number(row), experts), 0, "i64")
        at = f.gep(cursor, expert, "i64")
        f.store(f.add(f.load("i64", at), 1, "i64"), at)

    def place(e: str, carried: list[str]) -> list[str]:
        found, start = carried
        own = frame.element(cursor, e, "i64")
        some = f.cmp("gt", own, 0, "i64")

        def group() -> None:
            at = f.gep(listed, f.mul(found, 3, "i64"), "i64")
            for offset, value in enumerate((e, start, own)):
                frame.put(value, at, offset, "i64")
            if tables:
                _note(frame, tables, e, own)

        f.if_(some, group)
        frame.put(start, cursor, e, "i64")
        return [f.add(found, f.cast("zext", some, "i64", "i1"), "i64"), f.add(start, own, "i64")]

    def sort(row: str, _: list[str]) -> None:
        raw = number(row)
        expert = f.select(f.cmp("lt", raw, 0, "i64"), f.add(raw, experts, "i64"), raw, "i64")
        at = f.gep(cursor, f.select(f.cmp("ult", expert, experts, "i64"), expert, 0, "i64"), "i64")
        next_ = f.load("i64", at)
        frame.put(row, order, next_, "i64")
        f.store(f.add(next_, 1, "i64"), at)

    f.loop(0, experts, 1, [], clear)
    f.loop(0, rows, 1, [], tally)
    found, _ = f.loop(0, experts, 1, [("i64", 0), ("i64", 0)], place)
    frame.put(found, base, 0, "i64")
    f.loop(0, rows, 1, [], sort)
    if tables:
        _capture(frame, frame.pointer(tables[0]), rows, number)
    return frame.finish()


def _note(frame: Frame, tables: list[Buffer], expert: str, rows: str) -> None:
    """Counts a call of an expert."""
    f = frame.f
    block, table = map(frame.pointer, tables)
    there = f.cmp("ne", frame.element(table, f.mul(expert, 2, "i64"), "i64"), 0, "i64")
    hit = f.cast("zext", there, "i64", "i1")
    at = f.gep(f.gep(block, STATS, "i64"), f.mul(expert, 3, "i64"), "i64")
    for offset, more in enumerate((rows, hit, f.sub(1, hit, "i64"))):
        frame.put(f.add(frame.element(at, offset, "i64"), more, "i64"), at, offset, "i64")


def _capture(frame: Frame, block: str, rows: str, number: Callable[[str], str]) -> None:
    """Puts the numbers into the ring, if there is one."""
    f = frame.f
    ring = frame.element(block, RING, "ptr")

    def keep() -> None:
        calls, slots, room = (frame.element(block, at, "i64") for at in (CALLS, SLOTS, CAPACITY))
        slot = f.mul(f.binary("urem", calls, slots, "i64"), f.add(room, 1, "i64"), "i64")
        own = f.gep(ring, slot, "i64")
        frame.put(rows, own, 0, "i64")
        first = f.gep(own, 1, "i64")
        f.loop(0, f.min(rows, room, "i64"), 1, [], lambda row, _: frame.put(number(row), first, row, "i64"))
        frame.put(f.add(calls, 1, "i64"), block, CALLS, "i64")

    f.if_(f.cmp("ne", ring, "null", "ptr"), keep)


# ---- packing


def _strides(depth: str, columns: str, transposed: bool) -> tuple[str, str]:
    """Of rows and columns of a matrix."""
    return ("1", depth) if transposed else (columns, "1")


def _pack(op: GroupedMatMul, kernel: Kernel, target: Target) -> KernelCode:
    """A chunk is some panels of one expert."""
    (w,), (panels,) = kernel.operands, kernel.results
    assert kernel.special is not None
    found, encoding = panels_of(kernel.special, target), encoding_of(kernel.special)
    if encoding is not None and found is None:
        own = out_vars(2)
        return emit_nest(Store(panels, panels.shape, own, Load(w, own, w.dtype)), target.lanes)
    frame = Frame()
    f = frame.f
    number, depth, columns = sizes_of(kernel.special)
    wide = computed_in(kernel.special.inputs[1].dtype)
    cut = once(GroupedMatmulSchedule(number, number, columns, depth, wide.itemsize, target.rates))
    frame.chunks = Part(cut, "chunks")
    step, blocks = (frame.word(part(cut, name)) for name in ("panel_chunk", "panel_blocks"))
    k, n, width = frame.size(depth), frame.size(columns), panels.shape[-1]
    of_all, of_one = frame.product(panels.shape[1:]), frame.product(panels.shape[2:])
    rows, across = _strides(k, n, op.transposed)
    expert, first = f.binary("udiv", "%chunk", blocks, "i64"), f.binary("urem", "%chunk", blocks, "i64")
    first = f.mul(first, step, "i64")
    column = f.mul(first, frame.size(width), "i64")
    matrix = f.mul(k, n, "i64") if encoding is None else frame.size(blocks_bytes(encoding, depth, columns))
    source = f.gep(frame.pointer(w), f.mul(expert, matrix, "i64"), convert.memory_type(w.dtype))
    to = f.add(f.mul(expert, of_all, "i64"), f.mul(first, of_one, "i64"), "i64")
    out = f.gep(frame.pointer(panels), to, convert.llvm_type(panels.dtype))
    taken = f.min(step, f.sub(frame.size(panels.shape[1]), first, "i64"), "i64")
    left = f.sub(n, column, "i64")
    given = [k, left, rows, across, taken, f.mul(column, across, "i64")]
    routine = pack_routine(w.dtype, target) if found is None else found.routine(target)
    f.call(frame.word(routine), [source, out, *map(_i, given)])
    return frame.finish(optimize=False)


def _i(value: str) -> tuple[str, str]:
    return "i64", value


# ---- products


class _Product:
    """A chunk is some columns of all rows of one expert."""

    def __init__(self, op: GroupedMatMul, kernel: Kernel, target: Target) -> None:
        assert kernel.special is not None
        self.op = op
        x, groups, weights, *tables = kernel.operands
        numbers = kernel.special.inputs[2]
        (out,) = kernel.results
        self.frame = frame = Frame()
        self.f, self.dtype = frame.f, kernel.special.inputs[0].dtype
        self.wide = computed_in(self.dtype)
        found = panels_of(kernel.special, target)
        self.tile = tile_of(self.wide, target, format=None if found is None else found.format)
        number, depth, columns = sizes_of(kernel.special)
        self.decodes = found is not None and found.decodes
        self.few = 0 if found is None else found.few(target)
        rounded = found is not None and found.rounded
        rates = replace(target.rates, flops=SPEED * target.rates.flops) if rounded else target.rates
        count, size = size_product(out.shape[:-1]), self.wide.itemsize
        cut = once(GroupedMatmulSchedule(count, number, columns, depth, size, rates, self.decodes))
        frame.chunks = Part(cut, "chunks")
        self.own = frame.scratch(part(cut, "scratch"))
        self.step, self.blocks, self.sums_at, self.panels_at, self.decoded_at = (
            frame.word(part(cut, name)) for name in ("panel_chunk", "panel_blocks", "sums", "panels", "decoded")
        )
        self.k, self.n, self.experts = frame.size(depth), frame.size(columns), frame.size(number)
        self.line = frame.size(x.shape[-1])  # elements of a row of x, which may be records
        self.from_, self.memory, self.ty = frame.pointer(x), convert.memory_type(self.dtype), self.tile.scalar
        self.to, self.base = frame.pointer(out), frame.pointer(groups)
        rows = kernel.special.inputs[0].shape
        shared = same(rows[-2], 1) is True and same(numbers.shape[-1], 1) is not True
        self.per = frame.size(numbers.shape[-1]) if shared else "1"  # rows of the result that read one row of x
        encoding = encoding_of(kernel.special)
        self.routine = frame.word(gemm.block_routine(self.tile))
        routine = pack_routine(self.dtype, target, encoding) if found is None else found.routine(target)
        self.fetch, self.by_blocks = frame.word(routine), found is not None
        self.stored = "" if encoding is None else frame.size(blocks_bytes(encoding, depth, columns))
        self.by_table = bool(tables)
        self.table = frame.pointer(tables[0]) if tables else frame.pointer(weights)

    def code(self) -> KernelCode:
        f = self.f
        group = f.binary("udiv", "%chunk", self.blocks, "i64")
        first = f.mul(f.binary("urem", "%chunk", self.blocks, "i64"), self.step, "i64")
        # from panel to panel, in elements of memory
        blocks = self.by_blocks and self.tile.format.panel(f, self.k, self.ty)
        self.stride = blocks or f.mul(self.k, self.tile.width, "i64")
        f.if_(f.cmp("lt", group, f.load("i64", self.base), "i64"), lambda: self.run(group, first))
        return self.frame.finish(optimize=False)

    def run(self, group: str, first: str) -> None:
        """The rows of a group, in the columns from the panel `first` on."""
        f, frame, width = self.f, self.frame, self.tile.width
        at = f.gep(f.gep(self.base, GROUPS, "i64"), f.mul(group, 3, "i64"), "i64")
        expert, start, rows = (frame.element(at, i, "i64") for i in range(3))
        order = f.gep(self.base, f.add(f.add(f.mul(self.experts, 4, "i64"), GROUPS, "i64"), start, "i64"), "i64")
        column = f.mul(first, width, "i64")
        columns = f.min(f.mul(self.step, width, "i64"), f.sub(self.n, column, "i64"), "i64")
        taken = f.binary("udiv", f.add(columns, width - 1, "i64"), width, "i64")
        b = self.panels(expert, first, taken)

        def some_rows(listed: str, r0: str, r1: str) -> None:
            self.rows(listed, f.sub(r1, r0, "i64"), b, column, columns)

        row_parts(f, ("0", rows), ROWS, lambda r0, _: f.gep(order, r0, "i64"), some_rows)

    def panels(self, expert: str, first: str, taken: str) -> str:
        """The address of the first panel of this chunk, which has that number."""
        f = self.f
        column = f.mul(first, self.tile.width, "i64")

        def fetched(matrix: str) -> str:
            rows, across = _strides(self.k, self.n, self.op.transposed)
            room, left = f.offset(self.own, self.panels_at), f.sub(self.n, column, "i64")
            given = [self.k, left, rows, across, taken, f.mul(column, across, "i64")]
            f.call(self.fetch, [matrix, room, *map(_i, given)])
            return room

        if not self.by_table:
            if self.stored:
                return fetched(f.offset(self.table, f.mul(expert, self.stored, "i64")))
            area = f.mul(expert, f.mul(self.k, self.n, "i64"), "i64")
            return fetched(f.gep(self.table, area, self.memory))
        entry = f.gep(self.table, f.mul(expert, 2, "i64"), "i64")
        there = f.load("ptr", entry)
        if self.stored and not self.by_blocks:
            missing = f.cmp("eq", there, "null", "ptr")
            (blocks,) = f.if_(
                missing, lambda: [("ptr", f.load("ptr", f.gep(entry, 1, "i64")))], lambda: [("ptr", there)]
            )
            return fetched(blocks)
        (found,) = f.if_(
            f.cmp("ne", there, "null", "ptr"),
            lambda: [("ptr", f.gep(there, f.mul(first, self.stride, "i64"), self.tile.b_scalar))],
            lambda: [("ptr", fetched(f.load("ptr", f.gep(entry, 1, "i64"))))],
        )
        return found

    def rows(self, listed: str, count: str, b: str, column: str, columns: str) -> None:
        """Some rows, whose numbers are `listed`: where they lie, if they follow each other there, else copies."""
        f, frame, ty = self.f, self.frame, self.ty
        top = f.load("i64", listed)

        def source(row: str) -> str:
            place = row if self.per == "1" else f.binary("udiv", row, self.per, "i64")
            return f.gep(self.from_, f.mul(place, self.line, "i64"), self.memory)

        def target(row: str) -> str:
            return f.gep(self.to, f.add(f.mul(row, self.n, "i64"), column, "i64"), self.memory)

        def block(a: str, lda: str, c: str, ldc: str) -> None:
            room = f.offset(self.own, self.decoded_at) if self.decodes else "null"
            if self.few:
                room = f.select(f.cmp("le", count, self.few, "i64"), "null", room, "ptr")
            sizes: list[Typed] = [_i(count), _i(columns), _i(self.k), ("i64", PRODUCT_BLOCK), ("ptr", room)]
            f.call(self.routine, [a, _i(lda), b, _i(self.stride), c, _i(ldc), *sizes])

        def in_place() -> None:
            block(source(top), self.line, target(top), self.n)

        def by_copies() -> None:
            lda, ldc = f.add(self.line, COPY_PAD, "i64"), f.mul(self.step, self.tile.width, "i64")
            sums, lanes = f.offset(self.own, self.sums_at), self.tile.target.lanes

            def load_row(i: str, _: list[str]) -> None:
                row = source(frame.element(listed, i, "i64"))
                place = f.gep(self.own, f.mul(i, lda, "i64"), ty)
                _convert_row(f, lanes, row, self.dtype, place, self.wide, self.line)

            def store_row(i: str, _: list[str]) -> None:
                row = target(frame.element(listed, i, "i64"))
                place = f.gep(sums, f.mul(i, ldc, "i64"), ty)
                _convert_row(f, lanes, place, self.wide, row, self.dtype, columns)

            f.loop(0, count, 1, [], load_row)
            block(self.own, lda, sums, ldc)
            f.loop(0, count, 1, [], store_row)

        if self.dtype is not self.wide:
            by_copies()
            return
        direct = f.cmp("eq", count, 1, "i64")
        if self.per == "1":
            last = frame.element(listed, f.sub(count, 1, "i64"), "i64")
            direct = f.cmp("eq", f.sub(last, top, "i64"), f.sub(count, 1, "i64"), "i64")
        f.if_(direct, in_place, by_copies)


def blocks_bytes(encoding: Encoding, depth: Size, columns: Size) -> int:
    """Stored bytes of a matrix; sizes of encoded weights are ints."""
    assert isinstance(depth, int)
    assert isinstance(columns, int)
    return depth * columns // encoding.block * encoding.block_bytes


def sizes_of(node: Node) -> tuple[Size, Size, Size]:
    """Experts, depth and columns of a product."""
    op = node.op
    assert isinstance(op, GroupedMatMul)
    number, first, second = node.inputs[1].shape
    return (number, second, first) if op.transposed else (number, first, second)


def _convert_row(f: Function, lanes: int, source: str, own: DType, out: str, to: DType, count: str) -> None:
    """Copies a row of `count` elements, in vectors."""

    def some(w: int) -> Callable[[str, list[str]], None]:
        def turn(i: str, _: list[str]) -> None:
            before, after = convert.memory_type(own), convert.memory_type(to)
            raw = f.load(vec(before, w) if w > 1 else before, f.gep(source, i, before))
            value = convert.convert(f, convert.from_memory(f, raw, own, w), own, to, w)
            stored = convert.to_memory(f, value, to, w)
            f.store(stored, f.gep(out, i, after), ty=vec(after, w) if w > 1 else after)

        return turn

    whole = f.and_(count, -lanes, "i64")
    f.loop(0, whole, lanes, [], some(lanes))
    f.loop(whole, count, 1, [], some(1))


def _emit_pack(kernel: Kernel, target: Target) -> KernelCode:
    return _pack(_op(kernel), kernel, target)


def _emit_product(kernel: Kernel, target: Target) -> KernelCode:
    return _Product(_op(kernel), kernel, target).code()


def _op(kernel: Kernel) -> GroupedMatMul:
    assert kernel.special is not None
    assert isinstance(kernel.special.op, GroupedMatMul)
    return kernel.special.op


GROUP = Step("grouped_matmul.group", _group, packs=False)
PACK = Step("grouped_matmul.pack", _emit_pack)
PRODUCT = Step("grouped_matmul.product", _emit_product, packs=False)
