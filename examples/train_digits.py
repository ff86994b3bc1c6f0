"""Train the digit classifier that `rlx demo` runs, and write it as ONNX.

A small CNN in plain NumPy (backward pass by hand, Adam) on scikit-learn's handwritten digits: 1797 images of 8x8 pixels
with values 0..16 (Optical Recognition of Handwritten Digits, UCI, CC BY 4.0). 360 images, the same share of each digit,
are held out; they are saved beside the model and never trained on.

usage: python examples/train_digits.py [FOLDER]     FOLDER defaults to rlx/demo
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Array = NDArray[np.float32]
Params = dict[str, Array]

SEED = 7
HELD_OUT = 360
EPOCHS = 60
BATCH = 32
PEAK_RATE = 3e-3
DECAY = 1e-4
MIN_ACCURACY = 0.97


def initial_params(rng: np.random.Generator) -> Params:
    """He-initialised weights; convolutions are [out, in, 3, 3], linear layers [in, out], all float32."""

    def weight(shape: tuple[int, ...], fan_in: int) -> Array:
        values: NDArray[np.float64] = rng.standard_normal(shape) * np.sqrt(2 / fan_in)
        return values.astype(np.float32)

    return {
        "conv1.weight": weight((8, 1, 3, 3), 9),
        "conv1.bias": np.zeros(8, np.float32),
        "conv2.weight": weight((16, 8, 3, 3), 72),
        "conv2.bias": np.zeros(16, np.float32),
        "fc1.weight": weight((256, 32), 256),
        "fc1.bias": np.zeros(32, np.float32),
        "fc2.weight": weight((32, 10), 32),
        "fc2.bias": np.zeros(10, np.float32),
    }


def patches(x: Array) -> Array:
    """3x3 neighbourhoods of a zero-padded [n, c, h, w] array, as [n, h, w, c * 9]."""
    n, c, h, w = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1, 4, 5)).reshape(n, h, w, c * 9)


def conv(cols: Array, weight: Array, bias: Array) -> Array:
    """Convolution of `patches` output with [out, in, 3, 3] weights, as [n, out, h, w]."""
    out: Array = cols @ weight.reshape(len(weight), -1).T + bias
    return out.transpose(0, 3, 1, 2)


def conv_gradients(cols: Array, grad: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Gradients of a convolution's weight and bias from that of its output [n, out, h, w]."""
    rows = grad.transpose(0, 2, 3, 1).reshape(-1, shape[0])
    weight: Array = rows.T @ cols.reshape(len(rows), -1)
    return weight.reshape(shape), rows.sum(axis=0)


def loss_and_gradients(p: Params, images: Array, labels: NDArray[np.int64]) -> tuple[float, Params]:
    """Mean cross-entropy of a batch [n, 1, 8, 8] and its gradient for every parameter."""
    n = len(images)
    g: Params = {}

    cols1 = patches(images * np.float32(1 / 16))
    hidden1 = np.maximum(conv(cols1, p["conv1.weight"], p["conv1.bias"]), 0)
    cols2 = patches(hidden1)
    hidden2 = np.maximum(conv(cols2, p["conv2.weight"], p["conv2.bias"]), 0)
    blocks = hidden2.reshape(n, 16, 4, 2, 4, 2)
    pooled = blocks.max(axis=(3, 5))
    flat = pooled.reshape(n, 256)
    hidden3 = np.maximum(flat @ p["fc1.weight"] + p["fc1.bias"], 0)
    logits = hidden3 @ p["fc2.weight"] + p["fc2.bias"]
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_probs[np.arange(n), labels].mean()

    d_logits = np.exp(log_probs)
    d_logits[np.arange(n), labels] -= 1
    d_logits /= n
    g["fc2.weight"], g["fc2.bias"] = hidden3.T @ d_logits, d_logits.sum(axis=0)
    d_hidden3 = (d_logits @ p["fc2.weight"].T) * (hidden3 > 0)
    g["fc1.weight"], g["fc1.bias"] = flat.T @ d_hidden3, d_hidden3.sum(axis=0)
    d_pooled = (d_hidden3 @ p["fc1.weight"].T).reshape(pooled.shape)
    winners = blocks == pooled[:, :, :, None, :, None]
    d_hidden2 = (winners * d_pooled[:, :, :, None, :, None]).reshape(hidden2.shape) * (hidden2 > 0)
    g["conv2.weight"], g["conv2.bias"] = conv_gradients(cols2, d_hidden2, p["conv2.weight"].shape)
    flipped = p["conv2.weight"][:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
    d_hidden1 = conv(patches(d_hidden2), flipped, np.zeros(8, np.float32)) * (hidden1 > 0)
    g["conv1.weight"], g["conv1.bias"] = conv_gradients(cols1, d_hidden1, p["conv1.weight"].shape)
    return float(loss), g


def train(images: Array, labels: NDArray[np.int64]) -> Params:
    """Adam with weight decay and a cosine rate; images are [n, 1, 8, 8] with values 0..16, shifted by up to a pixel."""
    rng = np.random.default_rng(SEED)
    p = initial_params(rng)
    mean = {name: np.zeros_like(a) for name, a in p.items()}
    square = {name: np.zeros_like(a) for name, a in p.items()}
    steps = EPOCHS * (len(images) // BATCH)
    step = 0
    for epoch in range(EPOCHS):
        order = rng.permutation(len(images))
        total = 0.0
        for start in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            loss, g = loss_and_gradients(p, shifted(images[chosen], rng), labels[chosen])
            total += loss
            step += 1
            rate = PEAK_RATE * (1 + np.cos(np.pi * step / steps)) / 2
            for name, grad in g.items():
                mean[name] += 0.1 * (grad - mean[name])
                square[name] += 0.001 * (grad**2 - square[name])
                update = (mean[name] / (1 - 0.9**step)) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
                p[name] -= (rate * (update + DECAY * p[name])).astype(np.float32)
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1:3d}: loss {total / (len(images) // BATCH):.4f}")
    return p


def shifted(images: Array, rng: np.random.Generator) -> Array:
    """The batch, moved as a whole by -1, 0 or 1 pixels each way, with zeros coming in."""
    down, right = rng.integers(0, 3, size=2)
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return padded[:, :, down : down + 8, right : right + 8]


def to_onnx(p: Params) -> onnx.ModelProto:
    """The network as an ONNX model: "image" float32 [batch, 1, 8, 8] -> "probabilities" float32 [batch, 10]."""
    constants = {"scale": np.array(1 / 16, np.float32), **p}
    same: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Mul", ["image", "scale"], ["scaled"]),
        helper.make_node("Conv", ["scaled", "conv1.weight", "conv1.bias"], ["conv1"], **same),
        helper.make_node("Relu", ["conv1"], ["relu1"]),
        helper.make_node("Conv", ["relu1", "conv2.weight", "conv2.bias"], ["conv2"], **same),
        helper.make_node("Relu", ["conv2"], ["relu2"]),
        helper.make_node("MaxPool", ["relu2"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "fc1.weight", "fc1.bias"], ["fc1"]),
        helper.make_node("Relu", ["fc1"], ["relu3"]),
        helper.make_node("Gemm", ["relu3", "fc2.weight", "fc2.bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=-1),
    ]
    for node in nodes:
        node.name = node.output[0]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="rlx")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> int:
    """Train, write digits.onnx and digits_test.npz, and check the held-out accuracy of the written file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "rlx" / "demo"
    digits = load_digits()
    images = digits.images.astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=HELD_OUT, stratify=labels, random_state=SEED
    )

    model_path, test_path = folder / "digits.onnx", folder / "digits_test.npz"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx(train(train_x, train_y)), model_path)
    np.savez_compressed(test_path, images=test_x[:, 0].astype(np.uint8), labels=test_y.astype(np.uint8))

    session = onnxruntime.InferenceSession(model_path, providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(["probabilities"], {"image": test_x})
    accuracy = float((probabilities.argmax(axis=1) == test_y).mean())
    print(f"held-out accuracy {accuracy:.2%} on {len(test_y)} images ({model_path}, {model_path.stat().st_size} bytes)")
    if accuracy < MIN_ACCURACY:
        print(f"below the {MIN_ACCURACY:.0%} that the demo promises", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
