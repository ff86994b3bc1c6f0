"""Products and convolutions as one form, C[batch, m, n] = sum over k of a * b, and which way computes it.

A convolution is the product of its weights [O, C * taps] with windows of x [C * taps, N * places].
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.text.form import COLUMN, ROW, K, Product, Target, Window
from rlx.backends.cuda.text.function import PartStore, Text
from rlx.backends.cuda.text.loops import store_text
from rlx.backends.cuda.text.maps import LINE
from rlx.backends.cuda.text.thin import thin_text
from rlx.backends.cuda.text.tiles import tensor_text, tile_text
from rlx.backends.cuda.text.wgmma import wgmma_text
from rlx.ir.dtype import DTYPES, DType
from rlx.ir.shape import Shape, Size, exact_div, numel, upper
from rlx.kernels.affine import affine, linear_index, row_major
from rlx.kernels.expr import (
    Acc,
    Apply,
    Cast,
    Expr,
    Load,
    Reduce,
    Select,
    Var,
    const,
    guarded,
    index,
    size_expr,
    substitute_vars,
    transform,
    walk,
)
from rlx.kernels.lowering import Anchor, Attention, Contract, Conv, out_vars
from rlx.kernels.program import Buffer, Store
from rlx.records import replace

__all__ = ["multiplied_as", "operands", "parts_texts", "product_text"]

THIN = 4  # rows up to which a product is a loop nest: each element the sum of a row and a column


def product_text(store: Store, anchor: Contract | Conv, target: Target) -> Text:
    """The function of a product or convolution with what follows it."""
    acc = next((x.dtype for x in walk(store.expr) if isinstance(x, Acc)), None)
    if acc is None:
        return store_text(store)
    rows = anchor.m if isinstance(anchor, Contract) else store.extents[1] // anchor.groups
    most = upper(rows)
    narrow = multiplied_as(anchor, acc, target.precision)
    if most is not None and most <= THIN:
        few = None
        if isinstance(anchor, Contract) and acc.name == "f32" and anchor.zero is None and target.aligned:
            few = thin_text(store, contraction(store, anchor, narrow or acc))
        return few or store_text(sums(store, anchor, acc, narrow or acc))
    to = acc if narrow is None else narrow
    make = contraction(store, anchor, to) if isinstance(anchor, Contract) else windows(store, anchor, to)
    if narrow is None:
        return tile_text(store, make, acc)
    return wgmma_text([store], make, narrow, target) or tensor_text(store, make, narrow)


def parts_texts(stores: Sequence[Store], anchor: Contract, target: Target) -> list[Text]:
    """The functions of a product whose columns go to several stores: one, or one for each."""
    narrow = multiplied_as(anchor, DTYPES["f32"], target.precision)
    if narrow is not None:
        made = wgmma_text(stores, contraction(stores[0], anchor, narrow), narrow, target)
        if made is not None:
            return [made]
    texts = []
    for store in stores:
        assert isinstance(store, PartStore)
        column = out_vars(len(store.extents))[-1]
        b = substitute_vars(anchor.b, {column: column + index(store.first)})
        alone = Store(store.buffer, store.extents, store.index, store.expr)
        texts.append(product_text(alone, replace(anchor, n=store.extents[-1], b=b), target))
    return texts


def multiplied_as(anchor: Contract | Conv | Attention, acc: DType, precision: str) -> DType | None:
    """The type of 16 bits that tensor cores multiply, None where operands keep more bits."""
    if acc.name != "f32" or (not isinstance(anchor, Attention) and anchor.zero is not None):
        return None
    types = {e.dtype.name for e in operands(anchor).values()}
    if len(types) == 1 and types <= {"f16", "bf16"}:
        return DTYPES[next(iter(types))]
    return DTYPES[precision] if precision in ("f16", "bf16") and types <= {"f32", precision} else None


def operands(anchor: Anchor) -> dict[str, Expr]:
    """What an anchor multiplies, by the names of its fields."""
    match anchor:
        case Contract(a=a, b=b):
            return {"a": a, "b": b}
        case Conv(x=x, w=w):
            return {"x": x, "w": w}
        case Attention(q=q, k=k, v=v):
            return {"q": q, "k": k, "v": v}


def contraction(store: Store, anchor: Contract, acc: DType) -> Product:
    """A matrix product over the variables of tiles."""
    names = out_vars(len(store.extents))
    *batch, row, column = names
    at = {row: ROW, column: COLUMN}
    a, b = (_cast(substitute_vars(x, dict(at)), acc) for x in (anchor.a, anchor.b))
    if anchor.zero is not None:
        a = Apply("sub", (a, _cast(anchor.zero, acc)), acc)
    pairs = tuple((v, size) for v, size in zip(batch, store.extents, strict=False))
    return Product(pairs, anchor.m, anchor.n, anchor.k, a, b, {v: at.get(v, v) for v in names})


def windows(store: Store, anchor: Conv, acc: DType) -> Product:
    """A convolution as a product for each group: of weights and windows, with its channels as rows and its places as
    columns; where the result has its channels last, of windows and weights, the other way round."""
    n, o, *space = out_vars(len(store.extents))
    per_group, taps = anchor.w_shape[1], anchor.w_shape[2:]
    out_per_group = store.extents[1] // anchor.groups
    x_last = isinstance(anchor.x, Load) and has_last(anchor.x.indices, anchor.x.source.shape, Var("i1"))
    window = window_of(anchor, store) if x_last else None
    turned = window is not None or has_last(store.index, store.buffer.shape, o)
    own, other = (COLUMN, ROW) if turned else (ROW, COLUMN)
    group = Var("group")
    image, *place = apart(other, (store.extents[0], *store.extents[2:]))
    channel, tap = depth_places(per_group, taps, x_last)
    wide = group * size_expr(out_per_group) + own if anchor.groups > 1 else own
    x, w = factors(anchor, acc, image, (group, wide), (channel, *tap), place)
    flat, names = anchor.w, out_vars(len(anchor.w_shape))
    axes = list(zip(names, anchor.w_shape, strict=True))
    if isinstance(flat, Load) and lies_whole(flat, [axes[0], *axes[2:], axes[1]] if x_last else axes):
        view = flat.source.view((anchor.w_shape[0], numel((per_group, *taps))), flat.dtype)
        w = _cast(Load(view, (wide, K), flat.dtype), acc)
    if x_last and is_pointwise(anchor):
        assert isinstance(anchor.x, Load)
        rows = numel((anchor.x_shape[0], *anchor.x_shape[2:]))
        view = anchor.x.source.view((rows, per_group), anchor.x.dtype)
        x = _cast(Load(view, (other, K), anchor.x.dtype), acc)
    places = {n: image, o: wide, **dict(zip(space, place, strict=True))}
    columns, depth = numel((store.extents[0], *store.extents[2:])), numel((per_group, *taps))
    batch = ((group, anchor.groups),)
    if not turned:
        return Product(batch, out_per_group, columns, depth, w, x, places)
    return Product(batch, columns, out_per_group, depth, x, w, places, window)


def has_last(indices: Sequence[Expr], shape: Shape, channel: Var) -> bool:
    """Whether neighbouring channels are neighbours in memory, and no other axis is."""
    whole = linear_index(indices, shape).coefs.get(channel) == 1
    return len(shape) > 2 and whole and affine(indices[-1]).coefs == {channel: 1}


def depth_places(channels: Size, taps: Shape, last: bool) -> tuple[Expr, list[Expr]]:
    """The channel and the tap that a place of the depth is; channels are the innermost if they are last in memory."""
    if last:
        *tap, channel = apart(K, (*taps, channels))
        return channel, tap
    channel, *tap = apart(K, (channels, *taps))
    return channel, tap


def is_pointwise(anchor: Conv) -> bool:
    """Whether a window is a pixel, and all pixels are windows: the image is a matrix."""
    one = all(t == 1 for t in anchor.w_shape[2:]) and all(s == 1 for s in anchor.strides)
    return one and all(p == 0 for p in anchor.pads) and anchor.groups == 1 and whole_image(anchor) is not None


def whole_image(anchor: Conv) -> Buffer | None:
    """The buffer that the image is, [N, *spatial, C], each element as it is."""
    n, c, *space = zip(out_vars(len(anchor.x_shape)), anchor.x_shape, strict=True)
    return anchor.x.source if isinstance(anchor.x, Load) and lies_whole(anchor.x, [n, *space, c]) else None


def lies_whole(load: Load, axes: Sequence[tuple[Var, Size]]) -> bool:
    """Whether a load over these axes reads all of its source, in this order."""
    form = linear_index(load.indices, load.source.shape)
    strides = zip(axes, row_major([size for _, size in axes]), strict=True)
    apart = all(size == 1 or form.coefs.get(v) == stride for (v, size), stride in strides)
    others = form.coefs.keys() - {v for v, _ in axes}
    return load.where is None and apart and not others and form.constant == 0


def window_of(anchor: Conv, store: Store) -> Window | None:
    """The windows of an image of two axes that the copy engine walks: steps of the depth are within one tap."""
    image = whole_image(anchor)
    n, *rest = anchor.x_shape
    sizes = [s for s in (*rest, *store.extents[2:], *anchor.w_shape[2:], *anchor.pads) if isinstance(s, int)]
    if image is None or anchor.groups != 1 or len(anchor.strides) != 2 or len(sizes) != 11:
        return None
    c, h, w, out_h, out_w, tap_h, tap_w, *pads = sizes
    (stride_h, stride_w), (far_h, far_w) = anchor.strides, anchor.dilations
    reach = max((tap_h - 1) * far_h, (tap_w - 1) * far_w, *pads)
    fits = c % LINE == 0 and reach < 128 and max(anchor.strides) <= 8 and anchor.x.dtype.bits == 16
    if not fits or exact_div(image.offset, 16) is None:
        return None
    return Window(
        image,
        anchor.x.dtype.name,
        (n, h, w, c),
        (out_h, out_w),
        (tap_h, tap_w),
        (stride_h, stride_w),
        (far_h, far_w),
        (pads[0], pads[1], pads[2], pads[3]),
    )


def factors(
    anchor: Conv,
    acc: DType,
    image: Expr,
    channels: tuple[Expr, Expr],
    inner: Sequence[Expr],
    place: Sequence[Expr],
) -> tuple[Expr, Expr]:
    """What is multiplied: the element of x, 0 outside of it, and of w. `channels`: the group, and that of the result;
    `inner`: the channel within the group, and the tap."""
    rank, (group, wide), (channel, *tap) = len(place), channels, inner
    at = [
        i * s + t * d - size_expr(p)
        for i, s, t, d, p in zip(place, anchor.strides, tap, anchor.dilations, anchor.pads[:rank], strict=True)
    ]
    inside: Expr | None = None
    for i, size, low, high in zip(at, anchor.x_shape[2:], anchor.pads[:rank], anchor.pads[rank:], strict=True):
        if low != 0 or high != 0:
            test = (i >= 0) & (i < size_expr(size))
            inside = test if inside is None else inside & test
    source = group * size_expr(anchor.w_shape[1]) + channel if anchor.groups > 1 else channel
    names = out_vars(rank + 2)
    x = _cast(substitute_vars(anchor.x, dict(zip(names, (image, source, *at), strict=True))), acc)
    if anchor.zero is not None:
        x = Apply("sub", (x, _cast(anchor.zero, acc)), acc)
    if inside is not None:
        x = Select(inside, guarded(x, inside), const(0, acc))
    return x, _cast(substitute_vars(anchor.w, dict(zip(names, (wide, channel, *tap), strict=True))), acc)


def apart(flat: Expr, shape: Shape) -> list[Expr]:
    """The indices of a row-major number in a box."""
    made: list[Expr] = []
    for d in range(len(shape) - 1, 0, -1):
        size = size_expr(shape[d])
        made.append(flat % size)
        flat = flat // size
    return [flat, *reversed(made)]


def _cast(e: Expr, to: DType) -> Expr:
    return e if e.dtype is to else Cast(e, to)


def sums(store: Store, anchor: Contract | Conv, acc: DType, to: DType) -> Store:
    """The same as a loop nest whose elements are sums of products of operands rounded to a type."""
    if isinstance(anchor, Contract):
        product = contraction(store, anchor, to)
        back: dict[Var, Expr] = {to: v for v, to in product.places.items() if isinstance(to, Var)}
        extents: Shape = (product.k,)
        names: tuple[Var, ...] = (K,)
        a, b = substitute_vars(product.a, back), substitute_vars(product.b, back)
    else:
        image, wide, *place = out_vars(len(store.extents))
        extents = anchor.w_shape[1:]
        names = tuple(Var(f"r{d}") for d in range(len(extents)))
        group = wide // size_expr(store.extents[1] // anchor.groups)
        a, b = factors(anchor, to, image, (group, wide), names, place)
    total = Reduce("add", names, extents, Apply("mul", (_cast(a, acc), _cast(b, acc)), acc), acc)
    return neighbours_last(replace(store, expr=transform(store.expr, lambda x: total if isinstance(x, Acc) else None)))


def neighbours_last(store: Store) -> Store:
    """The store with the loop last that walks through neighbours in memory: neighbouring threads then have these."""
    names = out_vars(len(store.extents))
    coefs = linear_index(store.index, store.buffer.shape).coefs
    inner = next((v for v in names if coefs.get(v) == 1), names[-1])
    order = [*(v for v in names if v != inner), inner]
    renamed: dict[Var, Expr] = dict(zip(order, names, strict=True))
    extents = tuple(store.extents[names.index(v)] for v in order)
    index = tuple(substitute_vars(i, renamed) for i in store.index)
    return replace(store, extents=extents, index=index, expr=substitute_vars(store.expr, renamed))
