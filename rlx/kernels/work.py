"""What one kernel does, counted: bytes read and written, arithmetic, and the sizes that its speed depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from rlx.ir.graph import Node
from rlx.ir.shape import Shape, Size, evaluate
from rlx.kernels.affine import affine, linear_index
from rlx.kernels.expr import Acc, Apply, Cast, Check, Const, Expr, Load, Reduce, Select, SizeOf, Var, children, walk
from rlx.kernels.lowering import Attention, Contract, Conv, out_vars
from rlx.kernels.program import Buffer, Kernel, Store
from rlx.records import dataclass, field, replace

__all__ = ["GROUPED", "Work", "kernel_work"]

Extents = Mapping[str, int]

SCATTERED = "scattered"  # loads of elements that do not follow one another in the innermost loop, and sums of one value
PLAIN = "plain"  # an add, a compare, a select: one instruction
LOOP = "loop"  # elements written


@dataclass(frozen=True)
class Work:
    """The work of one kernel at given extents.

    `read` and `written` are bytes of device memory: of each operand what is touched, once, however often it is used.
    `flops` are arithmetic operations on floats (a product and a sum are two). `calls` counts elements by scalar
    function ("exp", "plain", ...), hoisted out of the loops that they don't depend on; "scattered" are loads and
    sums that can't be made in vectors. `shape` are the sizes of an anchor: (batch, m, k, n) of a product, (images,
    outputs, pixels, depth, groups) of a convolution, (batch, heads, query rows, keys, depth, value depth) of attention;
    `products` are its flops. `sizes` are what its speed depends on: those of the anchor, else the turns of its loops
    and of the innermost. `parts` is the number of array operations that the kernel takes without fusion.
    """

    read: int
    written: int
    flops: int
    calls: Mapping[str, int] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    parts: int = 1
    products: int = 0
    sizes: tuple[int, ...] = ()


def kernel_work(kernel: Kernel, extents: Extents) -> Work:
    """Counts a kernel at these extents; a node that is run as a whole costs what its op says."""
    if kernel.before is not None:
        return _joined_work(kernel, kernel.before, extents)
    node = kernel.host or kernel.special
    if node is not None:
        return (_grouped_work if node.op.op_name == GROUPED else _node_work)(kernel, node, extents)
    loops = _Loops(extents)
    calls: dict[str, int] = {}
    elements = 0
    for store in kernel.stores:
        sizes = loops.sizes(store.extents)
        loops.count([store.expr, *store.index], dict(zip(out_vars(len(sizes)), sizes, strict=True)), calls)
        elements += prod(sizes)
    calls[LOOP] = elements
    flops, shape = _anchor_flops(kernel, extents)
    written = sum(_written(store, extents) for store in kernel.stores)
    parts = max(1, loops.parts + (kernel.anchor is not None))
    speed = tuple(max(1, n) for n in shape) or loops.turns(kernel)
    return Work(_read(kernel, extents), written, flops + loops.flops, calls, shape, parts, flops, speed)


def _joined_work(kernel: Kernel, before: Kernel, extents: Extents) -> Work:
    """Both kernels, but what goes from one to the other is not in memory. It has the sizes of the larger product."""
    first, second = kernel_work(before, extents), kernel_work(replace(kernel, before=None), extents)
    between = sum(b.nbytes(dict(extents)) for b in before.writes())
    larger = max(first, second, key=lambda w: w.products)
    return replace(
        larger,
        read=first.read + second.read - between,
        written=second.written,
        flops=first.flops + second.flops,
        calls={name: first.calls.get(name, 0) + second.calls.get(name, 0) for name in {**first.calls, **second.calls}},
        parts=first.parts + second.parts,
        products=first.products + second.products,
    )


def _node_work(kernel: Kernel, node: Node, extents: Extents) -> Work:
    """A node that is run as a whole: its operands and results, and the flops that its op states."""
    at = dict(extents)
    read = sum(b.nbytes(at) for b in dict.fromkeys(kernel.operands))
    written = sum(b.nbytes(at) for b in kernel.results)
    work = getattr(node.op, "work", None)
    flops = 0 if work is None or node.regions else evaluate(work(*(v.type for v in node.inputs)).flops, extents)
    return Work(read, written, flops, sizes=tuple(max(1, n) for n in recurrence(node, extents)))


GROUPED = "grouped_matmul"


def _grouped_work(kernel: Kernel, node: Node, extents: Extents) -> Work:
    """A product whose rows go to experts; what packs weights or groups rows for it only moves bytes.

    Its sizes are groups (one for each expert at most), rows of one, k and n.
    """
    plain = _node_work(kernel, node, extents)
    if [b.shape for b in kernel.results] != [v.shape for v in node.outputs]:
        return replace(plain, flops=0)
    x, w, numbers = node.inputs
    out = kernel.results[0]
    shapes = (numbers.shape, w.shape[:1], x.shape[-1:], out.shape[-1:])
    rows, experts, k, n = (prod(evaluate(s, extents) for s in shape) for shape in shapes)
    groups = max(1, min(rows, experts))
    weights = sum(b.nbytes(dict(extents)) for b in kernel.operands if b.shape[:1] == w.shape[:1])
    read = plain.read - weights + weights * groups // max(experts, 1)
    return replace(plain, read=read, sizes=(groups, max(1, -(-rows // groups)), max(1, k), max(1, n)))


WEIGHTS = {"recurrence": 1, "lstm": 2, "gru": 2, "rnn": 2}  # by op: the input that takes a state to gates


def recurrence(node: Node, extents: Extents) -> tuple[int, ...]:
    """Steps, batch, hidden size and gates times that of a recurrent node; nothing of any other."""
    place = WEIGHTS.get(node.op.op_name)
    if place is None:
        return ()
    steps, batch, _ = (evaluate(s, extents) for s in node.inputs[0].shape)
    if node.op.attributes().get("batch_first"):
        steps, batch = batch, steps
    gates, hidden = (evaluate(s, extents) for s in node.inputs[place].shape[-2:])
    return steps, batch, hidden, gates


# ---- bytes


def _written(store: Store, extents: Extents) -> int:
    count = prod(evaluate(s, extents) for s in store.extents)
    whole = store.buffer.nbytes(dict(extents))
    return min(whole, count * store.buffer.dtype.numpy.itemsize)


def _read(kernel: Kernel, extents: Extents) -> int:
    """Bytes read: each distinct element of a buffer that loads reach, once; gathers reach a row for each index."""
    at = dict(extents)
    reached: dict[Buffer, dict[object, int]] = {}
    made = set() if kernel.anchor is None else {store.buffer for store in kernel.stores[1:]}  # by the kernel itself
    for expr, sizes in _spaces(kernel, extents):
        for load, loops in _loads(expr, sizes, extents):
            buffer = load.source
            if buffer.base in made:
                continue
            whole = buffer.nbytes(at)
            used = {x for i in load.indices for x in walk(i) if isinstance(x, Var)}
            count, key = prod(n for v, n in loops.items() if v in used), (buffer.offset, linear_key(load))
            nbytes, encoding = count * buffer.dtype.numpy.itemsize, buffer.base.encoding
            if encoding is not None:  # some bytes of a block for each element
                nbytes, key = -(-count // encoding.block) * encoding.block_bytes, (buffer.offset, frozenset(used))
            elif kernel.strategy is not None and load in kernel.strategy.panels(kernel):
                nbytes = kernel.strategy.panel_bytes(whole)
            places = reached.setdefault(buffer.base, {})
            places[key] = max(places.get(key, 0), min(whole, nbytes))
    return sum(min(b.nbytes(at), sum(places.values())) for b, places in reached.items())


def linear_key(load: Load) -> object:
    """What loads of the same elements have in common, whatever the shapes of the views that they go through."""
    index = linear_index(load.indices, load.source.shape)
    return index.constant, frozenset(index.coefs.items())


def _spaces(kernel: Kernel, extents: Extents) -> Iterator[tuple[Expr, dict[Var, int]]]:
    """Every expression of a kernel with the loops that it is in."""

    def box(shape: Shape) -> dict[Var, int]:
        return dict(zip(out_vars(len(shape)), (evaluate(s, extents) for s in shape), strict=True))

    packs = kernel.packs
    match kernel.anchor:
        case Contract(m=m, n=n, k=k, a=a, b=b) if not packs:
            loops = {**box((*kernel.stores[0].extents[:-2], m, n)), Var("k"): evaluate(k, extents)}
            yield from ((a, loops), (b, loops))
        case Conv(x=x, w=w, x_shape=x_shape, w_shape=w_shape):
            yield from ((x, box(x_shape)), (w, box(w_shape)))
        case Attention(q=q, k=k, v=v, score=score, q_shape=q_shape, k_shape=k_shape, v_shape=v_shape):
            if packs:
                yield from ((k, box(k_shape)), (v, box(v_shape)))
                return
            yield q, box(q_shape)
            for e, shape in ((k, k_shape), (v, v_shape)):
                yield e if kernel.strategy is None else kernel.strategy.read_at(kernel, e, extents), box(shape)
            if score is not None:
                yield score, box((*q_shape[:3], k_shape[2]))
    for store in kernel.stores:
        loops = box(store.extents)
        yield store.expr, loops
        yield from ((i, loops) for i in store.index)


def _loads(e: Expr, loops: Mapping[Var, int], extents: Extents) -> Iterator[tuple[Load, dict[Var, int]]]:
    """Every distinct load with the loops around it, those of reductions too."""
    inner = dict(loops)
    for x in walk(e):
        if isinstance(x, Reduce):
            inner |= {v: evaluate(n, extents) for v, n in zip(x.vars, x.extents, strict=True)}
    yield from ((x, inner) for x in walk(e) if isinstance(x, Load))


# ---- arithmetic


class _Loops:
    """Counts the evaluations of expressions, each as often as the loops that it depends on turn."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.parts = 0
        self.flops = 0
        self.free: dict[Expr, frozenset[Var]] = {}

    def sizes(self, shape: Iterable[Size]) -> list[int]:
        return [evaluate(s, self.extents) for s in shape]

    def turns(self, kernel: Kernel) -> tuple[int, ...]:
        """How often the loops turn; where there is a reduction or a copy, those around the innermost, and that."""
        found = [(1, 1)]
        for store in kernel.stores:
            own = self.sizes(store.extents)
            reduced = [prod(self.sizes(x.extents)) for x in walk(store.expr) if isinstance(x, Reduce)]
            inner = max([*reduced, 1]) if reduced else next((n for n in reversed(own) if n > 1), 1)
            found.append((max(1, prod(own) // (inner if prod(own) >= inner else 1)), max(1, inner)))
        most = max(found, key=prod)
        return (prod(most),) if kernel.kind == "map" else most

    def find_variables(self, e: Expr, store: frozenset[Var]) -> None:
        """The loop variables that expressions depend on, without those that their own reductions bind."""
        for x in walk(e):  # operands come first
            if x in self.free:
                continue
            found = frozenset((x,)) if isinstance(x, Var) else store if isinstance(x, Acc) else frozenset()
            found = found.union(*(self.free[k] for k in children(x)))
            self.free[x] = found - frozenset(x.vars) if isinstance(x, Reduce) else found

    def count(self, exprs: Iterable[Expr], loops: Mapping[Var, int], calls: dict[str, int]) -> None:
        """Adds what a store computes to `calls`."""
        seen: set[Expr] = set()
        self.free = {}
        for root in exprs:
            every = dict(loops)
            for x in walk(root):
                if isinstance(x, Reduce):
                    every |= dict(zip(x.vars, self.sizes(x.extents), strict=True))
            self.find_variables(root, frozenset(loops))
            skipped = {i for x in walk(root) if isinstance(x, Load) for i in _plain_indices(x)}
            inner = self.innermost(root, loops)
            for x in walk(root):
                if x in seen or x in skipped:
                    continue
                seen.add(x)
                self.one(x, every, inner, calls)

    def innermost(self, root: Expr, loops: Mapping[Var, int]) -> frozenset[Var]:
        """The loops that turn fastest: the last of the store, and of each reduction."""
        own = [v for v, n in loops.items() if n > 1]
        reduced = [x.vars[-1] for x in walk(root) if isinstance(x, Reduce) and x.vars]
        return frozenset([*own[-1:], *reduced])

    def one(self, x: Expr, loops: Mapping[Var, int], inner: frozenset[Var], calls: dict[str, int]) -> None:
        turns = prod(loops.get(v, 1) for v in self.free[x])
        match x:
            case Apply(fn=fn):
                self.parts += 1
                name = fn if fn in FUNCTIONS else PLAIN
                calls[name] = calls.get(name, 0) + turns
                self.flops += turns if x.dtype.kind in "fc" else 0
            case Select() | Cast() | Check():
                self.parts += 1
                calls[PLAIN] = calls.get(PLAIN, 0) + turns
            case Reduce(vars=vars, body=body):
                self.parts += 1
                steps = prod(loops.get(v, 1) for v in self.free[body] | frozenset(vars))
                kind = PLAIN if self.free[body] & inner else SCATTERED
                calls[kind] = calls.get(kind, 0) + steps
                self.flops += steps if body.dtype.kind in "fc" else 0
            case Load() if not _in_vectors(x, inner & self.free[x]):
                calls[SCATTERED] = calls.get(SCATTERED, 0) + turns


FUNCTIONS = frozenset((
    "exp", "log", "tanh", "erf", "normal_cdf", "sigmoid", "sin", "cos", "pow", "div", "sqrt", "floordiv", "mod", "idiv",
    "irem", "fmod",
))  # fmt: skip


def _plain_indices(load: Load) -> Iterator[Expr]:
    """The parts of a load's indices that cost nothing: linear forms of loop variables."""
    for i in load.indices:
        linear = affine(i).is_linear
        for x in walk(i):
            if linear or isinstance(x, Var | Const | SizeOf):
                yield x


def _in_vectors(load: Load, inner: frozenset[Var]) -> bool:
    """Whether neighbouring turns of the innermost loops that it depends on read neighbouring elements."""
    index = linear_index(load.indices, load.source.shape)
    steps = {index.coefs.get(v, 0) for v in inner}
    return index.is_linear and (1 in steps or steps <= {0})


def _anchor_flops(kernel: Kernel, extents: Extents) -> tuple[int, tuple[int, ...]]:
    """Flops of the anchor, and its sizes; nothing for the kernels that bring operands into a layout."""
    anchor, store = kernel.anchor, kernel.stores[0]
    if anchor is None or kernel.packs:
        return 0, ()
    match anchor:
        case Contract():
            batch = prod(evaluate(s, extents) for s in store.extents[:-2])
            m, k, n = (evaluate(s, extents) for s in (anchor.m, anchor.k, anchor.n))
            return 2 * batch * m * k * n, (batch, m, k, n)
        case Conv():
            images, outputs, *space = (evaluate(s, extents) for s in _result_shape(kernel))
            depth = prod(evaluate(s, extents) for s in anchor.w_shape[1:])
            sizes = (images, outputs, prod(space), depth, anchor.groups)
            return 2 * images * outputs * prod(space) * depth, sizes
    batch, heads, rows, depth = (evaluate(s, extents) for s in anchor.q_shape)
    keys, width = evaluate(anchor.k_shape[2], extents), evaluate(anchor.v_shape[3], extents)
    seen = min(rows, keys)  # rows that see keys at all: the last one all of them, each before it one less
    pairs = seen * (2 * keys - seen + 1) // 2 if anchor.causal else rows * keys
    return 2 * batch * heads * pairs * (depth + width), (batch, heads, rows, keys, depth, width)


def _result_shape(kernel: Kernel) -> Shape:
    return kernel.stores[0].extents
