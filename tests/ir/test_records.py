"""The project's `dataclass` does what the standard one does."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from rlx.records import dataclass, field, names_of, replace


@dataclass(frozen=True)
class Frozen:
    a: int
    b: str = "x"
    c: list[int] = dataclasses.field(default_factory=list, compare=False)


@dataclass
class Open:
    a: int

    def __post_init__(self) -> None:
        self.twice = self.a * 2


@dataclass(frozen=True, eq=False, repr=False)
class Plain:
    pass


@dataclass(frozen=True)
class Child(Frozen):
    d: int = 4


def test_fields_defaults_and_replace() -> None:
    one = Frozen(1)
    assert (one.a, one.b, one.c) == (1, "x", [])
    assert one.c is not Frozen(1).c
    assert dataclasses.replace(one, b="y") == Frozen(1, "y")
    assert dataclasses.asdict(Frozen(1, "z", [2])) == {"a": 1, "b": "z", "c": [2]}
    assert [f.name for f in dataclasses.fields(Child)] == ["a", "b", "c", "d"]
    with pytest.raises(TypeError, match="'a'"):
        Frozen()  # type: ignore[call-arg]


def test_equality_and_hash() -> None:
    assert Frozen(1, c=[1]) == Frozen(1, c=[2]), "c takes no part"
    assert hash(Frozen(1, c=[1])) == hash(Frozen(1, c=[2]))
    assert Frozen(1) != Frozen(2)
    assert Frozen(1) != Child(1), "another class"
    assert Open(1) == Open(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Open(1))
    assert len({Plain(), Plain()}) == 2, "by identity"


def test_frozen_post_init_and_repr() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="'a'"):
        Frozen(1).a = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'a'"):
        del Frozen(1).a
    assert Open(3).twice == 6
    assert repr(Child(1)) == "Child(a=1, b='x', c=[], d=4)"


def test_copies() -> None:
    one = Child(1, c=[3])
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other == one
        assert other.c == [3]


@dataclass
class Unused:
    a: int
    b: str = "x"


@dataclass(frozen=True)
class Unseen:
    a: int
    b: str = "x"


def test_the_signature_as_newer_pythons_find_it() -> None:
    assert str(inspect.signature(vars(Unseen)["__init__"].__get__(Unseen, type))) == "(a, b='x')"


def test_the_signature_is_known_before_the_first_object() -> None:
    assert str(inspect.signature(Unused)) == "(a, b='x')"
    match Unused(1):
        case Unused(a, b):
            assert (a, b) == (1, "x")


@dataclass(frozen=True)
class Lean:
    a: int
    b: list[int] = field(default_factory=list, compare=False)
    c: str = field(default="x", repr=False)


def test_fields_of_our_own() -> None:
    """`field`, `replace` and `names_of` are as the standard ones, before and after that module has looked."""
    for _ in range(2):
        one = Lean(1)
        assert (one, one.b, one.c) == (Lean(1, [2]), [], "x")
        assert one.b is not Lean(1).b
        assert replace(one, c="y") == Lean(1, c="y") != one
        assert repr(one) == "Lean(a=1, b=[])"
        assert names_of(one) == names_of(Lean) == ("a", "b", "c")
        with pytest.raises(TypeError, match="'a'"):
            Lean()  # type: ignore[call-arg]
        assert dataclasses.asdict(one) == {"a": 1, "b": [], "c": "x"}
        assert dataclasses.replace(one, a=2) == Lean(2)
