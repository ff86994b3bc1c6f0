"""Strings: what each op gives, how graphs of them run on the CPU, and what users may do with them."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.reference import run_graph
from rlx.errors import DTypeError, ExecutionError, OptionError, ShapeError
from rlx.ir import regex
from rlx.ir import strings as dictionaries
from rlx.ir.dtype import dtype_of
from rlx.ir.fingerprint import graphs_equal
from rlx.ir.regex import compile_pattern
from rlx.ir.strings import Dictionary, Texts
from rlx.ir.text import constants_table, parse_graph
from rlx.ops.control import If, Scan
from rlx.ops.select import Unique

WORDS = np.array([["Tee", "tee", ""], ["é", "a b", "Tee"]], object)


def both(graph: rlx.Graph, given: dict[str, Any]) -> list[Any]:
    """The outputs on the CPU, which are those of the reference."""
    expected = run_graph(graph, given)
    model = rlx.compile(graph, device="cpu", threads=1)
    found = model(given)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()
    assert [a.tolist() for a in model.run_slots(*given.values())] == [a.tolist() for a in expected.values()]
    return list(expected.values())


def test_what_moves_strings_is_run_by_kernels() -> None:
    """Gather, concat, where, transpose, slice, expand, equal: on numbers; the report has no step on the host."""
    g = rlx.Graph()
    x, n = g.input("x", (2, 3), "string"), g.input("n", (2,), "i64")
    table = g.constant(np.array(["zero", "one", "two", "Tee"], object).astype(np.dtypes.StringDType()))
    picked = rlx.ops.gather(table, n, 0)
    wide = rlx.ops.concat(x, rlx.ops.reshape(picked, (2, 1)), axis=1)
    same = rlx.equal(wide, rlx.ops.gather(table, g.constant(3), 0))
    g.output(rlx.where(same, rlx.ops.expand(g.constant(np.array("*", np.dtypes.StringDType())), (2, 4)), wide), "y")
    g.output(rlx.transpose(wide), "t")
    g.output(same, "same")
    y, t, same_found = both(g, {"x": WORDS, "n": np.array([3, 1])})
    assert y.tolist() == [["*", "tee", "", "*"], ["é", "a b", "*", "one"]]
    assert t.shape == (4, 2)
    assert same_found.tolist() == [[True, False, False, True], [False, False, True, False]]
    model = rlx.compile(g, device="cpu", threads=1)
    assert not [d for d in model.compilation.dispatch if d.how == "host"]


def test_what_reads_strings_is_a_step_on_the_host() -> None:
    """The report names it; sizes that strings decide change from run to run."""
    g = rlx.Graph()
    x = g.input("x", (rlx.Dim("n", 1, 100),), "string")
    parts, counts = rlx.ops.string_split(x, count=rlx.Dim("most", 0))
    g.output(rlx.ops.string_concat(parts, g.constant(np.array("!", np.dtypes.StringDType()))), "y")
    g.output(counts, "n")
    model = rlx.compile(g, device="cpu", threads=1)
    hosts = [d.op for d in model.compilation.dispatch if d.how == "host"]
    assert hosts == ["string_split", "string_concat"]
    for texts in (["a b c", ""], ["x"], [" ".join("abc") * 40], ["", ""]):
        expected = run_graph(g, {"x": np.array(texts, object)})
        found = model({"x": texts})
        assert found["y"].tolist() == expected["y"].tolist()
        assert found["n"].tolist() == [len(t.split()) for t in texts]


def test_strings_in_branches_and_loops() -> None:
    """Regions move strings and have steps of their own."""
    g = rlx.Graph()
    flag, x = g.input("flag", (), "bool"), g.input("x", (3, 2), "string")
    yes, no = rlx.Graph("yes"), rlx.Graph("no")
    up = yes.input("x", (3, 2), "string")
    yes.output(rlx.ops.string_normalizer(up, case="UPPER"), "y")
    no.output(no.input("x", (3, 2), "string"), "y")
    (chosen,) = g.add(If(), flag, x, regions=[yes, no])
    body = rlx.Graph("body")
    carry, row = body.input("c", (2,), "string"), body.input("row", (2,), "string")
    joined = rlx.ops.string_concat(carry, row)
    body.output(joined, "c")
    body.output(joined, "rows")
    start = g.constant(np.array(["<", ">"], np.dtypes.StringDType()))
    last, rows = g.add(Scan(1, 1), start, chosen, regions=[body])
    g.output(last, "last")
    g.output(rows, "rows")
    texts = np.array([["a", "b"], ["c", ""], ["é", "x"]], object)
    assert both(g, {"flag": np.array(True), "x": texts})[0].tolist() == ["<ACÉ", ">BX"]
    assert both(g, {"flag": np.array(False), "x": texts})[0].tolist() == ["<acé", ">bx"]


def test_text_that_grows_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is made: doubled in each round it would take all memory in forty; one string more a round, later."""
    monkeypatch.setattr(dictionaries, "MOST_TEXT", 1000)
    g = rlx.Graph()
    x = g.input("x", (2,), "string")
    y = x
    for _ in range(40):
        y = rlx.ops.string_concat(y, y)
    g.output(y, "y")
    model = rlx.compile(g, device="cpu", threads=1)
    with pytest.raises(ExecutionError, match=r"string_concat: .*1000 characters"):
        model.run([["a", "b"]])
    held = Dictionary(Texts([]))
    with pytest.raises(ExecutionError, match="1000 characters"):
        held.encode(np.array([str(n) * 100 for n in range(10, 20)], np.dtypes.StringDType()))


def test_the_dictionary_of_a_run_goes_with_it() -> None:
    """Memory does not grow with the strings that a process has seen; clones and runs don't share numbers."""
    g = rlx.Graph()
    x = g.input("x", (2,), "string")
    g.output(rlx.ops.string_concat(x, x), "y")
    model = rlx.compile(g, device="cpu", threads=1)
    twin = model.clone()
    for n in range(50):
        (y,) = model.run([[f"a{n}", "b"]])
        (z,) = twin.run([["b", f"a{n}"]])
        assert y.tolist() == [f"a{n}a{n}", "bb"]
        assert z.tolist() == ["bb", f"a{n}a{n}"]
    gc.collect()
    assert len(dictionaries._LIVE) == 0
    with pytest.raises(ExecutionError, match="no run whose dictionary"):
        dictionaries.dictionary(1 << 60)
    with pytest.raises(ExecutionError, match="no string of the run"):
        Dictionary(Texts(["a"])).decode(np.array([7], np.int32))


def test_strings_come_in_as_python_and_numpy_have_them() -> None:
    """Lists, fixed-width and variable-width arrays and objects; anything else is told by name."""
    g = rlx.Graph()
    x = g.input("x", (2,), "string")
    g.output(rlx.ops.string_normalizer(x, case="LOWER"), "y")
    model = rlx.compile(g, device="cpu", threads=1)
    for given in (["A", "B\0"], np.array(["A", "B\0C"]), np.array(["A", "B"], object).astype(np.dtypes.StringDType())):
        assert model(given)["y"].tolist()[0] == "a"
    target = np.zeros(2, np.dtypes.StringDType())
    (made,) = model.run([["A", "B"]], out=[target])
    assert made is target
    assert target.tolist() == ["a", "b"]
    assert model.run([["A", "B"]], outputs=["y"])[0].tolist() == ["a", "b"]
    assert model.submit([["Q", "R"]]).result()[0].tolist() == ["q", "r"]
    for wrong in ([1, 2], [b"a", b"b"], np.zeros(2), ["a", None], "\ud800", ["a", "\ud800"]):
        with pytest.raises((DTypeError, ShapeError), match="input 'x'"):
            model({"x": wrong})
    with pytest.raises(OptionError, match="belong to one run"):
        model.states.bind("x", ["a", "b"])


def test_what_strings_can_not_be() -> None:
    """Weights, states, numbers of arithmetic; each is refused where it is declared."""
    g = rlx.Graph()
    with pytest.raises(DTypeError, match="inputs, outputs or constants"):
        g.param("w", (2,), "string")
    with pytest.raises(DTypeError, match="inputs, outputs or constants"):
        g.state("s", (2,), "string")
    x = g.input("x", (2,), "string")
    for op in (lambda: rlx.relu(x), lambda: x + x, lambda: rlx.cast(x, "f32"), lambda: rlx.ops.pad(x, (0, 1))):
        with pytest.raises(DTypeError, match=r"takes no strings|expected"):
            op()


def test_unique_strings() -> None:
    g = rlx.Graph()
    x = g.input("x", (6,), "string")
    for output, value in zip("vfic", g.add(Unique(rlx.Dim("count", 0, 6)), x), strict=True):
        g.output(value, output)
    values, first, inverse, counts = both(g, {"x": np.array(["b", "a", "b", "", "c", "b"], object)})
    assert values.tolist() == ["", "a", "b", "c"]
    assert (first.tolist(), counts.tolist()) == ([3, 1, 0, 4], [1, 1, 3, 1])
    assert inverse.tolist() == [2, 1, 2, 0, 3, 2]


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "u8", "bool"])
def test_numbers_are_written_and_read(dtype: str) -> None:
    g = rlx.Graph()
    x = g.input("x", (4,), dtype)
    text = rlx.ops.number_to_string(x)
    g.output(text, "text")
    g.output(rlx.ops.string_to_number(text, to=dtype), "back")
    values = np.array([0, 1, 1, 0] if dtype == "bool" else [0, 3, 200, 1]).astype(dtype_of(dtype).numpy)
    if dtype in ("f32", "f64"):
        values = np.array([0.1, -3e-20, np.inf, np.nan], dtype.replace("f", "float"))
    text_found, back = both(g, {"x": values})[:2] if dtype[0] != "f" else _written(g, values)
    np.testing.assert_array_equal(back, values)
    assert text_found.dtype == np.dtypes.StringDType()


def _written(g: rlx.Graph, values: np.ndarray) -> tuple[Any, Any]:
    made = run_graph(g, {"x": values})
    found = rlx.compile(g, device="cpu", threads=1)(values)
    assert made["text"].tolist() == found["text"].tolist()
    assert made["text"].tolist()[2:] == ["INF", "NaN"]
    return found["text"], found["back"]


def test_text_that_is_no_number_stops_the_run() -> None:
    g = rlx.Graph()
    g.output(rlx.ops.string_to_number(g.input("x", (1,), "string"), to="i8"), "y")
    model = rlx.compile(g, device="cpu", threads=1)
    for text in ("one", "", "300", "1_0", "1.5"):
        with pytest.raises(ExecutionError, match="no number of type i8"):
            model([text])
    assert model(["-7"])["y"].tolist() == [-7]


def test_a_table_of_many_keys() -> None:
    """By equality, on strings and on their numbers; the first of equal keys, and NaN equals NaN."""
    keys = np.array([f"k{n}" for n in range(2000)] + ["k5"], np.dtypes.StringDType())
    g = rlx.Graph()
    x, y = g.input("x", (3,), "string"), g.input("y", (3,))
    g.output(rlx.ops.find_keys(x, keys), "at")
    g.output(rlx.ops.find_keys(y, np.array([2, np.nan, 1], np.float32)), "numbers")
    at, numbers = both(g, {"x": np.array(["k5", "k1999", "?"], object), "y": np.array([np.nan, 1, 3], np.float32)})
    assert at.tolist() == [5, 1999, 2001]
    assert numbers.tolist() == [1, 2, 3]


def test_strings_are_found_among_constants_without_the_host() -> None:
    """By a table of the constants' numbers: other constants, "" and what only the run brings are no keys; in loops too.

    Outputs in another order, and a part of them, are what was asked for.
    """
    keys, other = (np.array(words, np.dtypes.StringDType()) for words in (["a", "b", "a", "c"], ["z", ""]))
    g, body = rlx.Graph(), rlx.Graph("body")
    carry, word = body.input("carry", (), "i64"), body.input("word", (), "string")
    found = rlx.ops.find_keys(word, body.constant(keys))
    body.output(carry + found, "sum")
    body.output(found, "row")
    x = g.input("x", (rlx.Dim("n", 0, 99),), "string")
    for number, made in enumerate(g.add(Scan(1, 1), g.input("start", (), "i64"), x, regions=(body,))):
        g.output(made, f"y{number}")
    g.output(rlx.ops.find_keys(g.constant(other), keys), "others")
    g.output(rlx.ops.find_keys(x, g.constant(keys[:0])), "none")
    for words in (["b", "c", "q", "", "a", "z", "q"], []):
        _, rows, others, none = both(g, {"x": np.array(words, object), "start": np.array(3)})
        assert rows.tolist() == [{"a": 0, "b": 1, "c": 3}.get(word, 4) for word in words]
        assert (others.tolist(), none.tolist()) == ([4, 4], [0] * len(words))
    model = rlx.compile(g, device="cpu", threads=1)
    assert "host" not in model.explain("dispatch").splitlines()[0]
    given = {"start": np.array(3), "x": np.array(["c", "b"], object)}
    for _ in range(2):
        rows, total = model.run(given, outputs=["y1", "y0"])
        assert (rows.tolist(), total.tolist()) == ([3, 1], 7)
        assert [a.tolist() for a in model.run(given, outputs=["others"])] == [[4, 4]]


def test_a_graph_of_strings_reads_back_from_its_text(tmp_path: Path) -> None:
    """Attributes and constants, and so from a portable artifact; one with code, without a dictionary, is refused."""
    g = rlx.Graph("words")
    x = g.input("x", (2,), "string")
    few = g.constant(np.array(['"', "\n"], np.dtypes.StringDType()))
    g.output(rlx.ops.string_concat(rlx.ops.string_normalizer(x, case="UPPER"), few), "y")
    back = parse_graph(str(g), constants_table(g))
    assert graphs_equal(g, back)
    assert run_graph(back, {"x": ["a", "b"]})["y"].tolist() == ['A"', "B\n"]
    many = np.array([[f"w{n}"] for n in range(40)], np.dtypes.StringDType())
    g.output(rlx.equal(g.constant(many), rlx.ops.slice(x, (0,), (1,), (1,))), "hits")
    model = rlx.compile(g, device="cpu", threads=1)
    with pytest.raises(OptionError, match="portable=True"):
        model.save(tmp_path / "m.rlxart")
    model.save(tmp_path / "m.rlxart", portable=True)
    assert rlx.load(tmp_path / "m.rlxart", device="cpu")(["w7", "b"])["hits"].argmax() == 7


# ---- patterns


@pytest.mark.parametrize(
    "pattern, text, whole",
    [
        (r"(\W|^)[\w.\-]{0,25}@(yahoo|gmail)\.com(\W|$)", "account@gmail.com", True),
        (r"[[:alpha:]]+\d{2,3}", "abc123", True),
        (r"[[:alpha:]]+\d{2,3}", "abc1", False),
        (r"(?i)straße\b.?", "STRAßE!", True),
        (r"\pL+\x{1F686}\Q.*\E", "éa\U0001f686.*", True),
        (r"a.c", "a\nc", False),
        (r"(?s)a.c", "a\nc", True),
        (r"[^a-c\d]*", "xyz]", True),
        (r"\w+", "é", False),
    ],
)
def test_patterns_are_those_of_re2(pattern: str, text: str, whole: bool) -> None:
    assert compile_pattern(pattern).fullmatch(text) is whole


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "a{2000}", "(?=a)", r"\1", "[b-a]", "[[:no:]]", "*", "(" * 300, "a{1000}{1000}", "a" + "*" * 5000,
        "((((){1000}){1000}){1000}){1000}", "(" * 90 + "a" + ("*" * 90 + ")") * 90,
    ],
)  # fmt: skip
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(OptionError, match="pattern"):
        compile_pattern(pattern)


def test_the_deepest_patterns() -> None:
    """As deep as groups may be, with what takes most calls for each."""
    for ends, count in (("|b)", 80), (")*", 80), ("|b)*", 60)):
        assert compile_pattern("(" * count + "a" + ends * count).fullmatch("a")


def test_no_pattern_takes_more_than_linear_time() -> None:
    """Nested repeats, with which matching by trial takes 2^n steps: the steps that are kept are few."""
    for pattern in ("(a+)+$", "(a|a)*b", "(a|aa)+$", "(.*a){20}"):
        made = compile_pattern(pattern)
        assert not made.fullmatch("a" * 400 + "c")
        assert len(made.steps) < 2000


@pytest.mark.parametrize("pattern", ["a.*b", "a|a.*b", "(a|b)*c", "(a.*b)?", r"\ba+$", "(?:a.*b|a)*?c", "x*"])
def test_finding_goes_once_over_the_text(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a match fails late from every place, each character is looked at a few times, not as often as there are."""
    made, steps = compile_pattern(pattern), 0
    step = made._step

    def counted(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*args)

    monkeypatch.setattr(made, "_step", counted)
    for text in ("a" * 3000, "ab" * 1500 + "a", "a " * 1500):
        steps = 0
        list(made.find(text))
        assert steps <= 6 * len(text) + 10


def test_patterns_of_too_many_sets_are_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end on until the sets are too many, then from each place."""
    monkeypatch.setattr(regex, "MOST_ALIVE", 40)
    text = "abaabbbabbaabab" * 20
    for pattern in ("[ab]{7}a[ab]*a", "b[ab]{5}a", "a+b"):
        spans = [match.span() for match in re.finditer(pattern, text)]
        assert list(regex.Pattern(pattern).find(text)) == spans


@pytest.mark.sample(60)
@pytest.mark.parametrize("seed", range(600))
def test_patterns_match_as_those_of_python(seed: int) -> None:
    """Random patterns of the syntax that both have, whole and from each place on."""
    rng = np.random.default_rng(seed)

    def part(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return str(rng.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", "(?:ab)"]))
        if kind < 0.6:
            return part(depth - 1) + part(depth - 1)
        if kind < 0.75:
            return f"(?:{part(depth - 1)}|{part(depth - 1)})"
        inner = part(depth - 1)
        if re.fullmatch(inner, ""):  # repeats of nothing end elsewhere in Python than in RE2
            return inner
        return f"(?:{inner})" + str(rng.choice(["*", "+", "?", "{1,2}", "{2}"]))

    for _ in range(10):
        pattern = str(rng.choice(["", r"\b", "^"])) + part(3)
        text = "".join(rng.choice(list("abc1 "), rng.integers(0, 9)))
        theirs, ours = re.compile(pattern, re.ASCII), compile_pattern(pattern)
        assert ours.fullmatch(text) == (theirs.fullmatch(text) is not None), (pattern, text)
        alive = ours._alive(text)
        for start in range(len(text)):
            found = theirs.match(text, start)
            end = None if found is None else found.end()
            assert ours.match(text, start) == end, (pattern, text, start)
            assert ours._match(text, start, alive) == (end, start if end is None else end), (pattern, text, start)
        expected, at = [], 0
        while at < len(text):  # as Python's own finditer, but for matches of nothing
            found = theirs.match(text, at)
            if found is not None and found.end() > at:
                expected.append((at, found.end()))
            at = max(at + 1, found.end() if found is not None else 0)
        assert list(ours.find(text)) == expected, (pattern, text)
