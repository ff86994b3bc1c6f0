"""Writes tests/importers/sklearn: pipelines of scikit-learn as skl2onnx exports them, and scikit-learn's own answers.

Needs scikit-learn, skl2onnx and pandas: python tools/sklearn_models.py
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "importers" / "sklearn"
ROWS = 24  # of each case

TEXTS = [
    "the train to Bern leaves at nine", "a late train is still a train", "rain all day in the valley",
    "Cheese, bread and a good knife", "The knife is dull; sharpen it!", "snow on the pass, the road is closed",
    "no bread left at the station", "the valley road is open again", "nine trains a day to the valley",
    "sharpen the old knife with care", "good cheese needs good milk", "rain and snow: stay at home",
    "open the gate for the cows", "cows give milk, milk gives cheese", "the station clock is five late",
    "stay for bread and cheese", "a closed pass is a safe pass", "Milk at nine, bread at ten",
    "the last train left the station", "clouds, rain, sun and rain again", "home is where the cheese is",
    "the clock in Bern is never late", "the sun is over the pass", "ten cows on the closed road",
]  # fmt: skip
TOPICS = [
    *("travel", "travel", "weather", "food", "food", "weather", "food", "travel", "travel", "food", "food", "weather"),
    *("food", "food", "travel", "food", "travel", "food", "travel", "weather", "food", "travel", "weather", "travel"),
]
TOWNS = np.array(["Bern", "Chur", "Thun", "Genève"])
SIZES = np.array(["small", "large", "middle"])

Case = Callable[[], tuple[Any, dict[str, Any], list[tuple[str, Any]], dict[Any, Any]]]
CASES: dict[str, Case] = {}


def case(make: Case) -> Case:
    """Decorator: the function gives a fitted model, its inputs, their types for skl2onnx, and options of the export."""
    CASES[make.__name__] = make
    return make


def _numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features f32 [ROWS, 4], a class 0 to 2 and a number for each row."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    classes = np.digitize(x[:, 0] + 0.5 * x[:, 1], [-0.5, 0.5])
    return x, classes, (x @ np.array([1, -2, 0.5, 0]) + 3).astype(np.float32)


def _labels() -> np.ndarray:
    return np.array([("low", "middle", "high")[n] for n in _numbers()[1]])


def _floats(x: np.ndarray) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    from skl2onnx.common.data_types import FloatTensorType

    return {"x": x}, [("x", FloatTensorType([None, x.shape[1]]))]


def _numeric(model: Any, target: np.ndarray | None, options: dict[Any, Any] | None = None, x: Any = None) -> Any:
    x = _numbers()[0] if x is None else x
    return model.fit(x, target), *_floats(x), options or {}


def _texts(model: Any, target: Any = None, options: dict[Any, Any] | None = None) -> Any:
    from skl2onnx.common.data_types import StringTensorType

    texts = np.array(TEXTS, object)
    return model.fit(texts, target), {"text": texts[:, None]}, [("text", StringTensorType([None, 1]))], options or {}


def _table() -> tuple[Any, list[tuple[str, Any]]]:
    """A table of two columns of strings and two of floats, one with gaps."""
    import pandas
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    rng, x = np.random.default_rng(5), _numbers()[0]
    income = x[:, 1].copy()
    income[::5] = np.nan
    table = pandas.DataFrame(
        {"town": rng.choice(TOWNS, ROWS), "size": rng.choice(SIZES, ROWS), "age": x[:, 0], "income": income}
    )
    types = {"town": StringTensorType, "size": StringTensorType, "age": FloatTensorType, "income": FloatTensorType}
    return table, [(name, made([None, 1])) for name, made in types.items()]


def _on_table(model: Any, target: Any = None, options: dict[Any, Any] | None = None) -> Any:
    table, types = _table()
    for name in ("town", "size"):
        table[name] = table[name].astype(object)
    return model.fit(table, target), table, types, options or {}


def _columns(*more: Any) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return ColumnTransformer([("words", encoder, ["town", "size"]), ("numbers", numbers, ["age", "income"]), *more])


# ---- text


@case
def count_words() -> Any:
    from sklearn.feature_extraction.text import CountVectorizer

    return _texts(CountVectorizer(token_pattern="[a-zA-Z0-9_]+"))


@case
def tfidf_bigrams() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return _texts(TfidfVectorizer(ngram_range=(1, 2), token_pattern="[a-zA-Z0-9_]+"))


@case
def tfidf_without_case_or_norm() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    made = TfidfVectorizer(lowercase=False, norm=None, min_df=2, token_pattern="[a-zA-Z]+", smooth_idf=False)
    return _texts(made)


@case
def binary_words_by_naive_bayes() -> Any:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    words = CountVectorizer(binary=True, token_pattern="[a-zA-Z0-9_]+", max_features=40)
    return _texts(make_pipeline(words, MultinomialNB()), TOPICS, {"zipmap": False})


@case
def topics_by_logistic_regression() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(token_pattern="[a-zA-Z0-9_]+", norm="l1")
    return _texts(make_pipeline(words, LogisticRegression(C=50)), TOPICS)  # with ZipMap


@case
def topics_by_ridge_of_characters() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import RidgeClassifier
    from sklearn.pipeline import make_pipeline

    characters = TfidfVectorizer(analyzer="char", ngram_range=(2, 2))
    return _texts(make_pipeline(characters, RidgeClassifier()), TOPICS, {"zipmap": False})


@case
def topics_by_sgd_and_chosen_words() -> Any:
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
    from sklearn.feature_selection import SelectKBest, chi2
    from sklearn.linear_model import SGDClassifier
    from sklearn.pipeline import make_pipeline

    words = CountVectorizer(token_pattern="[a-zA-Z0-9_]+")
    chosen = SelectKBest(chi2, k=20)
    made = make_pipeline(words, TfidfTransformer(), chosen, SGDClassifier(loss="modified_huber", random_state=0))
    return _texts(made, TOPICS, {"zipmap": False})


@case
def topics_by_svd_and_forest() -> Any:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(token_pattern="[a-zA-Z0-9_]+")
    forest = RandomForestClassifier(8, max_depth=4, random_state=0)
    return _texts(make_pipeline(words, TruncatedSVD(6, random_state=0), forest), TOPICS, {"zipmap": False})


# ---- tables with strings


@case
def one_hot_columns() -> Any:
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.preprocessing import OneHotEncoder

    words = _table()[0][["town", "size"]].to_numpy(object)
    made = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(words)
    given = words.copy()
    given[0, 0] = "Basel"  # a town that the encoder does not know
    return made, {"x": given}, [("x", StringTensorType([None, 2]))], {}


@case
def ordinal_columns() -> Any:
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.preprocessing import OrdinalEncoder

    words = _table()[0][["town", "size"]].to_numpy(object)
    made = OrdinalEncoder(categories=[sorted(TOWNS), list(SIZES)]).fit(words)
    return made, {"x": words}, [("x", StringTensorType([None, 2]))], {}


@case
def table_by_logistic_regression() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return _on_table(make_pipeline(_columns(), LogisticRegression()), _labels(), {"zipmap": False})


@case
def table_by_gradient_boosting() -> Any:
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.pipeline import make_pipeline

    made = make_pipeline(_columns(), GradientBoostingClassifier(n_estimators=6, max_depth=2, random_state=0))
    return _on_table(made, _labels())  # with ZipMap


@case
def ordinal_table_by_tree() -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OrdinalEncoder
    from sklearn.tree import DecisionTreeClassifier

    columns = ColumnTransformer([("words", OrdinalEncoder(), ["town", "size"]), ("age", "passthrough", ["age"])])
    made = make_pipeline(columns, DecisionTreeClassifier(max_depth=4, random_state=0))
    return _on_table(made, _labels(), {"zipmap": False})


@case
def table_by_ridge() -> Any:
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline

    return _on_table(make_pipeline(_columns(), Ridge()), _numbers()[2])


@case
def text_beside_numbers() -> Any:
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = _table()[0][["age"]].assign(text=np.array(TEXTS, object))
    words = TfidfVectorizer(token_pattern="[a-zA-Z0-9_]+")
    columns = ColumnTransformer([("text", words, "text"), ("age", StandardScaler(), ["age"])])
    made = make_pipeline(columns, LogisticRegression(C=20)).fit(table, TOPICS)
    types = [("age", FloatTensorType([None, 1])), ("text", StringTensorType([None, 1]))]
    return made, table, types, {"zipmap": False}


# ---- numbers, labels of strings or integers


@case
def svc_with_probabilities() -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _numeric(
            make_pipeline(StandardScaler(), SVC(probability=True, random_state=0)), _labels(), {"zipmap": False}
        )


@case
def svc_of_two_classes() -> Any:
    from sklearn.svm import SVC

    return _numeric(SVC(kernel="poly", degree=2), np.where(_numbers()[1] > 0, "yes", "no"), {"raw_scores": True})


@case
def random_forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return _numeric(RandomForestClassifier(10, max_depth=4, random_state=0), _labels())  # with ZipMap


@case
def hist_gradient_boosting() -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    x = _numbers()[0].copy()
    x[::7, 2] = np.nan
    made = HistGradientBoostingClassifier(max_iter=6, min_samples_leaf=3, random_state=0)
    return _numeric(made, _labels(), {"zipmap": False}, x)


@case
def neighbours() -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return _numeric(KNeighborsClassifier(3), _labels(), {"zipmap": False})


@case
def gaussian_naive_bayes() -> Any:
    from sklearn.naive_bayes import GaussianNB

    return _numeric(GaussianNB(), _numbers()[1], {"zipmap": False})


@case
def multilayer_perceptron() -> Any:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    made = make_pipeline(MinMaxScaler(), MLPClassifier((8, 6), activation="tanh", max_iter=400, random_state=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _numeric(made, _labels(), {"zipmap": False})


@case
def imputer_and_components() -> Any:
    from sklearn.decomposition import PCA
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import RobustScaler

    x = _numbers()[0].copy()
    x[::6, 1] = np.nan
    return _numeric(make_pipeline(SimpleImputer(), RobustScaler(), PCA(3)), None, x=x)


@case
def polynomials_by_elastic_net() -> Any:
    from sklearn.linear_model import ElasticNet
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    return _numeric(make_pipeline(PolynomialFeatures(2), ElasticNet(alpha=0.01)), _numbers()[2])


@case
def clusters() -> Any:
    from sklearn.cluster import KMeans
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return _numeric(make_pipeline(StandardScaler(), KMeans(3, n_init=3, random_state=0)), None)


@case
def isolation_forest() -> Any:
    from sklearn.ensemble import IsolationForest

    return _numeric(IsolationForest(n_estimators=8, max_samples=16, random_state=0), None)


@case
def voting() -> Any:
    from sklearn.ensemble import ExtraTreesClassifier, VotingClassifier
    from sklearn.linear_model import LogisticRegression

    trees = ExtraTreesClassifier(5, max_depth=3, random_state=0)
    made = VotingClassifier([("line", LogisticRegression()), ("trees", trees)], voting="soft", flatten_transform=False)
    return _numeric(made, _labels(), {"zipmap": False})


@case
def ada_boost_of_integers() -> Any:
    from sklearn.ensemble import AdaBoostClassifier

    return _numeric(AdaBoostClassifier(n_estimators=5, random_state=0), _numbers()[1], {"zipmap": False})


# ---- writing


def answers(model: Any, x: Any) -> list[np.ndarray]:
    """What scikit-learn gives, in the order of the outputs of the export."""
    from sklearn.base import is_classifier, is_clusterer, is_outlier_detector, is_regressor

    if is_regressor(model):
        return [np.reshape(model.predict(x), (-1, 1))]
    if is_outlier_detector(model):
        return [model.predict(x)[:, None], model.decision_function(x)[:, None]]
    if is_clusterer(model):
        return [model.predict(x), model.transform(x)]
    if is_classifier(model):
        scores = model.predict_proba(x) if hasattr(model, "predict_proba") else model.decision_function(x)
        return [model.predict(x), np.stack([-scores, scores], 1) if scores.ndim == 1 else scores]
    made = model.transform(x)
    return [made.toarray() if hasattr(made, "toarray") else made]


def as_json(array: Any) -> dict[str, Any]:
    array = np.asarray(array)
    text = array.dtype.kind in "OUT"
    values = array.astype(object).reshape(-1).tolist() if text else array.reshape(-1).tolist()
    return {"dtype": "string" if text else array.dtype.name, "shape": list(array.shape), "values": values}


def lists_for_arrays() -> None:
    """Has skl2onnx 1.20 give lists of numbers where it gives arrays or bools as attributes, which onnx 1.23 refuses."""
    from skl2onnx.common._container import ModelComponentContainer

    add = ModelComponentContainer.add_node

    def listed(self: Any, *args: Any, **attributes: Any) -> Any:
        given = {n: a.tolist() if isinstance(a, np.ndarray) else a for n, a in attributes.items()}
        given = {n: [int(v) if type(v) is bool else v for v in a] if type(a) is list else a for n, a in given.items()}
        return add(self, *args, **given)

    ModelComponentContainer.add_node = listed


def write(name: str) -> None:
    from skl2onnx import to_onnx

    model, given, types, options = CASES[name]()
    from sklearn.pipeline import Pipeline

    last = model.steps[-1][1] if isinstance(model, Pipeline) else model
    made = to_onnx(
        model,
        initial_types=types,
        options={id(last): options} if options else None,
        target_opset={"": 20, "ai.onnx.ml": 3},
    )
    made.producer_version = ""
    inputs = {n: np.asarray(given[n]).reshape(-1, 1) for n, _ in types} if hasattr(given, "columns") else given
    x: Any = given if hasattr(given, "columns") else next(iter(given.values()))
    outputs = answers(model, x[:, 0] if "text" in inputs and len(inputs) == 1 else x)
    (FOLDER / f"{name}.onnx").write_bytes(made.SerializeToString())
    facts = {
        "inputs": {n: as_json(a) for n, a in inputs.items()},
        "outputs": {o.name: as_json(a) for o, a in zip(made.graph.output, outputs, strict=True)},
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(facts, ensure_ascii=False) + "\n")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    lists_for_arrays()
    for name in CASES:
        write(name)
        print(name, (FOLDER / f"{name}.onnx").stat().st_size)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
