"""Products of matrices, and attention."""

from __future__ import annotations

import numpy as np

from cliff_cases.base import MICROSOFT, SMALLER, Fixed, Net, Pick, cases, net, scalar


@cases(
    "MatMul",
    size=(128, 1, 8, 16, 32, 64, 256, 512),
    rows=[0, 1, 2, 4, 8],
    columns=[0, 1, 2, 4, 8],
    batch=[1, 4, 64],
    dtype=["f32", "f64", "f16", "bf16", "i32"],
    held=[True, False],
)
def matmul(p: Pick) -> Net:
    n, m, k = p.rows or p.size, p.columns or p.size, p.size
    lead = () if p.batch == 1 else (p.batch,)
    b = p.array(*(() if p.held else lead), k, m)
    return net(p.op, p.array(*lead, n, k), Fixed(b) if p.held else b, work=p.batch * n * m * k)


@cases(
    "Gemm",
    size=(128, 1, 8, 32, 64, 256, 512),
    rows=[0, 1, 4],
    left=[0, 1],
    right=[0, 1],
    dtype=["f32", "f64", "f16"],
    held=[True, False],
)
@cases("FusedGemm", size=(128, 32, 512), rows=[0, 1, 4], left=[0, 1], right=[0, 1], held=[True, False])
def gemm(p: Pick) -> Net:
    n, k = p.rows or p.size, p.size
    a, b = p.array(*((k, n) if p.left else (n, k))), p.array(k, k)
    domain = {"domain": MICROSOFT, "activation": "Relu"} if p.op == "FusedGemm" else {}
    return net(
        p.op, a, Fixed(b) if p.held else b, p.weights(k), transA=p.left, transB=p.right, work=n * k * k, **domain
    )


@cases("FusedMatMul", size=(128, 32, 512), left=[0, 1], right=[0, 1], held=[True, False])
def fused_matmul(p: Pick) -> Net:
    b = p.array(p.size, p.size)
    return net(
        p.op,
        p.array(p.size, p.size),
        Fixed(b) if p.held else b,
        transA=p.left,
        transB=p.right,
        alpha=0.5,
        domain=MICROSOFT,
        work=p.size**3,
    )


@cases(
    "Einsum",
    size=(32, 8, 16, 64, 128),
    rule=[
        "bij,bjk->bik",
        "ij,jk->ik",
        "ij,kj->ik",
        "bij,bkj->bik",
        "ij->ji",
        "ij,ij->i",
        "bij,bik->bjk",
        "ijk->ik",
        "i,j->ij",
    ],
)
def einsum(p: Pick) -> Net:
    left = p.rule.split("->")[0]
    operands = [p.array(*[p.size] * len(axes)) for axes in left.split(",")]
    return net(p.op, *operands, equation=p.rule, work=p.size ** len({*left} - {","}))


@cases(
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "QGemm",
    size=(128, 8, 32, 64, 256, 512),
    rows=[0, 1, 4],
)
def matmul_bytes(p: Pick) -> Net:
    n, k = p.rows or p.size, p.size
    a, b, z = p.array(n, k, dtype="u8"), p.weights(k, k, dtype="i8"), scalar(0, "i8")
    work = n * k * k
    match p.op:
        case "MatMulInteger":
            return net(p.op, a, b, scalar(50, "u8"), z, work=work)
        case "QLinearMatMul":
            return net(
                p.op, a, scalar(0.1), scalar(50, "u8"), b, scalar(0.1), z, scalar(20), scalar(100, "u8"), work=work
            )
        case "DynamicQuantizeMatMul":
            return net(p.op, p.array(n, k), b, scalar(0.1), z, domain=MICROSOFT, work=work)
        case "MatMulIntegerToFloat":
            return net(p.op, a, b, scalar(0.1), scalar(0.1), scalar(50, "u8"), z, domain=MICROSOFT, work=work)
        case _:
            scales = [scalar(0.1), scalar(50, "u8"), b, scalar(0.1), z, None, scalar(20), scalar(100, "u8")]
            return net(p.op, a, *scales, domain=MICROSOFT, work=work)


@cases("MatMulNBits", size=(256, 64, 512, 1024), rows=[1, 4, 64], bits=[4, 8], block=[32, 128])
def matmul_bits(p: Pick) -> Net:
    k = p.size
    blocks = -(-k // p.block)
    packed = Fixed(p.rng.integers(0, 256, (k, blocks, p.block * p.bits // 8)).astype(np.uint8))
    scales = p.weights(k, blocks)
    return net(
        p.op,
        p.array(p.rows, k),
        packed,
        scales,
        K=k,
        N=k,
        bits=p.bits,
        block_size=p.block,
        domain=MICROSOFT,
        work=p.rows * k * k,
    )


@cases("CDist", size=(128, 16, 64, 512), row=[16, 2, 128], metric=["euclidean", "sqeuclidean"])
def cdist(p: Pick) -> Net:
    return net(
        p.op, p.array(p.size, p.row), p.array(p.size, p.row), metric=p.metric, domain=MICROSOFT, work=p.size**2 * p.row
    )


@cases(
    "Attention",
    opset=23,
    size=(128, 1, 16, 64, 512),
    keys=[0, 128, 1024],
    heads=[4, 1, 16],
    groups=[1, 4],
    width=[64, 8, 128],
    causal=[0, 1],
    dtype=["f32", "f16"],
)
def attention(p: Pick) -> Net:
    keys, few = p.keys or p.size, max(1, p.heads // p.groups)
    k, v = (p.array(1, few, keys, p.width) for _ in range(2))
    return net(
        p.op, p.array(1, p.heads, p.size, p.width), k, v, is_causal=p.causal, work=2 * p.heads * p.size * keys * p.width
    )


@cases(
    "MultiHeadAttention",
    "com.microsoft.Attention",
    "QAttention",
    "GroupQueryAttention",
    size=(128, 1, 16, 64, 512),
    heads=[4, 1, 16],
)
def microsoft_attention(p: Pick) -> Net:
    n, width = p.size, 32 * p.heads
    attributes = {"domain": MICROSOFT, "num_heads": p.heads, "work": n * width * (2 * n + 3 * width)}
    x, op = p.array(1, n, width), p.op.removeprefix("com.microsoft.")
    if op == "Attention":
        return net(op, x, p.weights(width, 3 * width, low=-0.1, high=0.1), p.weights(3 * width), **attributes)
    if op == "QAttention":
        weights = [p.weights(width, 3 * width, dtype="i8"), p.weights(3 * width), scalar(0.1), scalar(0.01)]
        return net(
            op, p.array(1, n, width, dtype="u8"), *weights, None, scalar(50, "u8"), scalar(0, "i8"), **attributes
        )
    keys = [p.array(1, n, width), p.array(1, n, width)]
    attributes["work"] = 2 * n * n * width
    if op == "MultiHeadAttention":
        return net(op, x, *keys, **attributes)
    lengths = [Fixed(np.array([n - 1], np.int32)), scalar(n, "i32")]
    return net(op, x, *keys, None, None, *lengths, kv_num_heads=p.heads, outputs=3, **attributes)


@cases("RotaryEmbedding", opset=23, size=SMALLER, width=[64, 8, 128], interleaved=[0, 1])
@cases("com.microsoft.RotaryEmbedding", size=SMALLER, width=[64, 8, 128], interleaved=[0, 1])
def rotary(p: Pick) -> Net:
    steps = max(1, p.size // p.width // 4)
    x, tables = p.array(1, 4, steps, p.width), [p.weights(steps, p.width // 2), p.weights(steps, p.width // 2)]
    positions = np.arange(steps)[None]
    if p.op == "RotaryEmbedding":
        return net(p.op, x, *tables, positions, interleaved=p.interleaved)
    return net("RotaryEmbedding", x, positions, *tables, domain=MICROSOFT, interleaved=p.interleaved)
