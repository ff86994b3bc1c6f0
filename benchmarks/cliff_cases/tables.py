"""Signals, random numbers, losses, and ops of tables (ai.onnx.ml)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cliff_cases.base import ML, SIZES, SMALLER, Net, Pick, cases, ints, net, scalar


@cases(
    "DFT",
    opset=20,
    size=(1024, 8, 64, 100, 1000, 1021, 4096, 16384, 65536, 65537),
    rows=[1, 64],
    real=[1, 0],
    inverse=[0, 1],
)
def dft(p: Pick) -> Net:
    rows = min(p.rows, max(1, (1 << 20) // p.size))
    whole = not p.real or p.inverse
    x = p.array(rows, p.size, 2 if whole else 1)
    return net(
        p.op, x, None, scalar(1, "i64"), onesided=int(not whole), inverse=p.inverse, work=x.size * np.log2(p.size)
    )


@cases("STFT", size=(1 << 14, 1 << 10, 1 << 12, 1 << 16), frame=[256, 64, 400, 1024], step=[128, 64])
def stft(p: Pick) -> Net:
    frame = min(p.frame, p.size)
    return net(p.op, p.array(1, p.size, 1), scalar(p.step, "i64"), p.weights(frame), scalar(frame, "i64"))


@cases("RandomNormal", "RandomUniform", size=SIZES)
def random(p: Pick) -> Net:
    return net(p.op, shape=[p.size], seed=1.0, work=p.size)


@cases("RandomNormalLike", "RandomUniformLike", "Bernoulli", size=SIZES)
def random_like(p: Pick) -> Net:
    return net(p.op, p.array(p.size, low=0, high=1), seed=1.0)


@cases("Multinomial", size=(1024, 16, 65536), count=[16, 1, 1024])
def multinomial(p: Pick) -> Net:
    return net(p.op, p.array(4, p.size), sample_size=p.count, seed=1.0)


@cases(
    "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", size=SIZES, row=[64, 2, 1000], reduction=["mean", "none"]
)
def loss(p: Pick) -> Net:
    rows = max(1, p.size // p.row)
    return net(p.op, p.array(rows, p.row), p.below(p.row, rows), reduction=p.reduction)


@cases("Det", size=(8, 1, 2, 3, 4, 16, 64, 128), batch=[16, 1, 256], dtype=["f32", "f64"])
def det(p: Pick) -> Net:
    return net(p.op, p.array(p.batch, p.size, p.size), work=p.batch * p.size**3)


@cases("TfIdfVectorizer", size=SMALLER, dtype=["i64", "i32"])
def tfidf(p: Pick) -> Net:
    pool = [*range(100), *(x for i in range(100) for x in (i, i + 1))]
    attributes: dict[str, Any] = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": 2,
        "max_skip_count": 0,
        "ngram_counts": [0, 100],
    }
    return net(p.op, p.array(p.size), pool_int64s=pool, ngram_indexes=[*range(200)], **attributes)


@cases(
    "Binarizer",
    "Imputer",
    "Scaler",
    "Normalizer",
    "FeatureVectorizer",
    "ArrayFeatureExtractor",
    "LabelEncoder",
    "OneHotEncoder",
    size=SIZES,
    row=[16, 4, 256],
)
def table(p: Pick) -> Net:
    n, m = max(1, p.size // p.row), p.row
    x = p.array(n, m)
    match p.op:
        case "Binarizer":
            return net(p.op, x, domain=ML, threshold=0.5)
        case "Imputer":
            return net(p.op, x, domain=ML, imputed_value_floats=[0.5] * m, replaced_value_float=float("nan"))
        case "Scaler":
            return net(p.op, x, domain=ML, offset=[0.5] * m, scale=[2.0] * m)
        case "Normalizer":
            return net(p.op, x, domain=ML, norm="L2")
        case "FeatureVectorizer":
            return net(p.op, x, p.array(n, m), domain=ML, inputdimensions=[m, m])
        case "ArrayFeatureExtractor":
            return net(p.op, x, ints(*range(0, m, 2)), domain=ML)
        case "LabelEncoder":
            return net(
                p.op,
                p.below(100, n, m),
                domain=ML,
                keys_int64s=[*range(90)],
                values_int64s=[*range(90, 0, -1)],
                default_int64=-1,
            )
        case _:
            return net(p.op, p.below(12, n), domain=ML, cats_int64s=[*range(10)], zeros=1)


@cases("LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor", size=SMALLER, row=[16, 4, 256])
def linear(p: Pick) -> Net:
    n, m = max(1, p.size // p.row), p.row
    x = p.array(n, m)
    numbers = [float(v) for v in p.array(40 * m)]
    match p.op:
        case "LinearRegressor":
            return net(p.op, x, domain=ML, coefficients=numbers[: 2 * m], intercepts=[0.5, 1.0], targets=2)
        case "LinearClassifier":
            return net(
                p.op,
                x,
                domain=ML,
                coefficients=numbers[: 3 * m],
                intercepts=[0.5, 1.0, 0.0],
                classlabels_ints=[0, 1, 2],
                post_transform="SOFTMAX",
                outputs=2,
            )
        case "SVMRegressor":
            return net(
                p.op,
                x,
                domain=ML,
                coefficients=numbers[:40],
                support_vectors=numbers,
                n_supports=40,
                kernel_type="RBF",
                kernel_params=[0.1, 0.0, 3.0],
                rho=[0.1],
                work=n * m * 40,
            )
        case _:
            counts = {"vectors_per_class": [20, 20], "classlabels_ints": [0, 1], "rho": [0.1]}
            return net(
                p.op,
                x,
                domain=ML,
                coefficients=numbers[:40],
                support_vectors=numbers,
                kernel_type="RBF",
                kernel_params=[0.1, 0.0, 3.0],
                outputs=2,
                work=n * m * 40,
                **counts,
            )


@cases(
    "TreeEnsembleRegressor",
    "TreeEnsembleClassifier",
    "TreeEnsemble",
    size=(1024, 1, 8, 64, 16384),
    trees=[50, 1, 500],
    depth=[6, 2, 10],
)
def trees(p: Pick) -> Net:
    inner, leaves = (1 << p.depth) - 1, 1 << p.depth
    count = p.trees * (inner + leaves)
    node = np.tile(np.arange(inner + leaves), p.trees)
    leaf = node >= inner
    columns: dict[str, Any] = {
        "nodes_treeids": np.repeat(np.arange(p.trees), inner + leaves),
        "nodes_nodeids": node,
        "nodes_featureids": np.where(leaf, 0, p.below(10, count)),
        "nodes_modes": np.where(leaf, "LEAF", "BRANCH_LEQ"),
        "nodes_values": np.where(leaf, 0, p.array(count)).astype(float),
        "nodes_truenodeids": np.where(leaf, 0, 2 * node + 1),
        "nodes_falsenodeids": np.where(leaf, 0, 2 * node + 2),
    }
    kind = "class" if p.op == "TreeEnsembleClassifier" else "target"
    for name, values in (
        ("treeids", columns["nodes_treeids"][leaf]),
        ("nodeids", node[leaf]),
        ("ids", p.below(3, leaf.sum())),
        ("weights", p.array(int(leaf.sum())).astype(float)),
    ):
        columns[f"{kind}_{name}"] = values
    attributes = {name: list(values.tolist()) for name, values in columns.items()}
    x, work = p.array(p.size, 10), p.size * p.trees * p.depth
    if kind == "class":
        return net(p.op, x, domain=ML, classlabels_int64s=[0, 1, 2], outputs=2, work=work, **attributes)
    return net("TreeEnsembleRegressor", x, domain=ML, n_targets=3, work=work, **attributes)
