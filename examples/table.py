"""A pipeline of scikit-learn, compiled: numbers of a table in, classes and probabilities out.

usage: python examples/table.py     it needs scikit-learn and skl2onnx
"""

from __future__ import annotations

import sys

import numpy as np

import rlx

try:
    from sklearn.datasets import load_wine
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
except ImportError:
    sys.exit("this needs scikit-learn and skl2onnx: pip install scikit-learn skl2onnx")


def main() -> None:
    wine = load_wine()
    seen, unseen, labels, wanted = train_test_split(wine.data.astype(np.float32), wine.target, random_state=0)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(seen, labels)

    model = rlx.load(pipeline, example_inputs=seen[:1], device="cpu")
    answers, probabilities = model.run([unseen])
    print(f"{len(unseen)} wines, {(answers == wanted).mean():.1%} right; as scikit-learn says: "
          f"{np.array_equal(answers, pipeline.predict(unseen))}")  # fmt: skip
    print(f"probabilities differ by {np.abs(probabilities - pipeline.predict_proba(unseen)).max():.0e} at most")


if __name__ == "__main__":
    main()
