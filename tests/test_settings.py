"""Mappings and text to dataclasses: what is accepted, and the one line that says what is not."""

from dataclasses import dataclass
from typing import Literal

import pytest

from stages.plumbing.settings import SettingsError, as_dict, laid_over, leaves, nested, of


@dataclass(frozen=True)
class Inner:
    r: int = of(16, "rank")
    dropout: float = of(0.05, "share")


@dataclass(frozen=True)
class Outer:
    inner: Inner = of(Inner(r=8, dropout=0.1), "adapter")
    rate: float = of(1e-5, "step")
    steps: int | None = of(10, "or null")
    kind: Literal["a", "b"] = of("a", "of two")
    names: tuple[str, ...] = of((), "list")
    on: bool = of(False, "switch")

    def __post_init__(self):
        if self.steps == 13:
            raise ValueError("steps must not be 13")


def complaint(values: dict, from_text: bool = False) -> str:
    with pytest.raises(SettingsError) as caught:
        laid_over(Outer(), values, "here", from_text=from_text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_differences_are_laid_over_the_sections_own_default():
    assert laid_over(Outer(), {"inner": {"r": 4}}, "here") == Outer(inner=Inner(r=4, dropout=0.1))


def test_text_becomes_the_fields_type():
    text = {"rate": "2e-5", "steps": "7", "on": "true", "names": "q,v", "inner": {"r": "4"}}
    given = laid_over(Outer(), text, "here", from_text=True)
    assert given == Outer(rate=2e-5, steps=7, on=True, names=("q", "v"), inner=Inner(r=4, dropout=0.1))
    assert laid_over(Outer(), {"steps": "null"}, "here", from_text=True).steps is None
    assert laid_over(Outer(), {"on": "false"}, "here", from_text=True).on is False


def test_whole_numbers_serve_as_numbers():
    rate = laid_over(Outer(), {"rate": 1}, "here").rate
    assert rate == 1.0 and type(rate) is float


def test_unknown_keys_name_the_nearest():
    assert complaint({"ratee": 1}) == "here: unknown key 'ratee'; did you mean 'rate'?"
    assert complaint({"inner": {"dropuot": 1}}) == "here: inner: unknown key 'dropuot'; did you mean 'dropout'?"
    assert "known keys: inner, rate" in complaint({"zzz": 1})


@pytest.mark.parametrize(("values", "says"), [
    ({"rate": "1e-5"}, "here: rate must be a number, not '1e-5' (YAML reads 1e-5 as text: write 1.0e-5)"),
    ({"rate": "0.1"}, "here: rate must be a number, not '0.1' (drop the quotes)"),
    ({"steps": 1.5}, "here: steps must be a whole number, not 1.5"),
    ({"steps": True}, "here: steps must be a whole number, not True"),
    ({"rate": None}, "here: rate must be a number, not None"),
    ({"on": "yes"}, "here: on must be true or false, not 'yes'"),
    ({"kind": "c"}, "here: kind must be one of 'a', 'b', not 'c'"),
    ({"names": 3}, "here: names must be a list, not 3"),
    ({"inner": 3}, "here: inner is a section: give it as {name: value}, not 3"),
    ({"steps": 13}, "here: steps must not be 13"),
])
def test_wrong_values_say_what_is_wanted(values, says):
    assert complaint(values) == says


def test_text_that_is_no_number_is_refused_too():
    assert complaint({"steps": "many"}, from_text=True) == "here: steps must be a whole number, not 'many'"
    assert complaint({"on": "perhaps"}, from_text=True) == "here: on must be true or false, not 'perhaps'"


def test_plain_values_and_dotted_names():
    assert as_dict(Outer(names=("q",)))["names"] == ["q"]
    names = [name for name, _, _ in leaves(Outer())]
    assert names == ["inner.r", "inner.dropout", "rate", "steps", "kind", "names", "on"]
    assert nested({"inner.r": 4, "rate": 1}) == {"inner": {"r": 4}, "rate": 1}
