"""Mappings and text to dataclasses: what is accepted, and the one line that says what is not."""

from dataclasses import dataclass
from typing import Literal

import pytest

from stages.recipe.schema import SettingsError, flatten, nest, override, setting, to_dict


@dataclass(frozen=True)
class Inner:
    r: int = setting(16, "rank")
    dropout: float = setting(0.05, "share")


@dataclass(frozen=True)
class Item:
    name: str = setting("first", "label")
    weight: float = setting(1.0, "factor")

    def __post_init__(self):
        if self.name == "none":
            raise ValueError("name must not be none")


@dataclass(frozen=True)
class Outer:
    inner: Inner = setting(Inner(r=8, dropout=0.1), "adapter")
    rate: float = setting(1e-5, "step")
    steps: int | None = setting(10, "or null")
    kind: Literal["a", "b"] = setting("a", "of two")
    names: tuple[str, ...] = setting((), "list")
    on: bool = setting(False, "switch")
    items: tuple[Item, ...] = setting((Item(),), "list of sections")

    def __post_init__(self):
        if self.steps == 13:
            raise ValueError("steps must not be 13")


def complaint(values: dict, from_text: bool = False) -> str:
    with pytest.raises(SettingsError) as caught:
        override(Outer(), values, "here", from_text=from_text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_differences_are_laid_over_the_sections_own_default():
    assert override(Outer(), {"inner": {"r": 4}}, "here") == Outer(inner=Inner(r=4, dropout=0.1))


def test_text_becomes_the_fields_type():
    text = {"rate": "2e-5", "steps": "7", "on": "true", "names": "q,v", "inner": {"r": "4"}}
    given = override(Outer(), text, "here", from_text=True)
    assert given == Outer(rate=2e-5, steps=7, on=True, names=("q", "v"), inner=Inner(r=4, dropout=0.1))
    assert override(Outer(), {"steps": "null"}, "here", from_text=True).steps is None
    assert override(Outer(), {"on": "false"}, "here", from_text=True).on is False


def test_whole_numbers_serve_as_numbers():
    rate = override(Outer(), {"rate": 1}, "here").rate
    assert rate == 1.0 and type(rate) is float


def test_unknown_keys_name_the_nearest():
    assert complaint({"ratee": 1}) == "here: unknown key 'ratee'; did you mean 'rate'?"
    assert complaint({"inner": {"dropuot": 1}}) == "here: inner: unknown key 'dropuot'; did you mean 'dropout'?"
    assert "known keys: inner, rate" in complaint({"zzz": 1})


@pytest.mark.parametrize(("values", "says"), [
    ({"steps": "1e-5"}, "here: steps must be a whole number, not '1e-5'"),
    ({"rate": "1e-5x"}, "here: rate must be a number, not '1e-5x'"),
    ({"rate": "0.1"}, "here: rate must be a number, not '0.1' (drop the quotes)"),
    ({"steps": 1.5}, "here: steps must be a whole number, not 1.5"),
    ({"steps": True}, "here: steps must be a whole number, not True"),
    ({"rate": None}, "here: rate must be a number, not None"),
    ({"on": "yes"}, "here: on must be true or false, not 'yes'"),
    ({"kind": "c"}, "here: kind must be one of 'a', 'b', not 'c'"),
    ({"names": 3}, "here: names must be a list, not 3"),
    ({"items": 3}, "here: items must be a list of mappings, as [{name: value}] with names of name, weight, not 3"),
    ({"items": ["a"]},
     "here: items must be a list of mappings, as [{name: value}] with names of name, weight, not ['a']"),
    ({"items": {"name": "a"}},
     "here: items must be a list of mappings, as [{name: value}] with names of name, weight, not {'name': 'a'}"),
    ({"items": [{}, {"wieght": 1}]}, "here: items, entry 2: unknown key 'wieght'; did you mean 'weight'?"),
    ({"items": [{"weight": "1"}]}, "here: items, entry 1: weight must be a number, not '1' (drop the quotes)"),
    ({"items": [{"name": "none"}]}, "here: items, entry 1: name must not be none"),
    ({"inner": 3}, "here: inner is a section: give it as {name: value}, not 3"),
    ({"steps": 13}, "here: steps must not be 13"),
])
def test_wrong_values_say_what_is_wanted(values, says):
    assert complaint(values) == says


@pytest.mark.parametrize("from_text", [True, False])
@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.e-05", "10.0e-6"])
def test_an_exponent_without_a_point_is_a_number(text, from_text):
    """YAML 1.1 reads it as text."""
    given = override(Outer(), {"rate": text, "steps": "2e3"}, "here", from_text=from_text)
    assert given == Outer(rate=1e-5, steps=2000)
    assert override(Outer(), {"rate": f"-{text}"}, "here", from_text=from_text).rate == -1e-5


def test_text_that_is_no_number_is_refused_too():
    assert complaint({"steps": "many"}, from_text=True) == "here: steps must be a whole number, not 'many'"
    assert complaint({"on": "perhaps"}, from_text=True) == "here: on must be true or false, not 'perhaps'"


@pytest.mark.parametrize("text", ['[{"name": "a", "weight": 0.5}, {}]', "[{name: a, weight: 5e-1}, {}]"])
def test_a_list_of_sections_as_text_is_json_or_yaml(text):
    assert override(Outer(), {"items": text}, "here", from_text=True).items == (Item("a", 0.5), Item())


@pytest.mark.parametrize("text", ["first", "[{", "", "[a, b]", "7"])
def test_text_that_is_no_list_of_sections_is_one_line(text):
    assert "here: items must be a list of mappings" in complaint({"items": text}, from_text=True)


def test_a_list_of_sections_is_replaced_whole_and_comes_back_as_itself():
    given = override(Outer(), {"items": [{"name": "a"}, {"weight": 2}]}, "here")
    assert given.items == (Item("a", 1.0), Item("first", 2.0))
    assert to_dict(given)["items"] == [{"name": "a", "weight": 1.0}, {"name": "first", "weight": 2.0}]
    assert override(Outer(), to_dict(given), "here") == given
    assert override(Outer(), {"items": [{"weight": "2e-1"}]}, "here", from_text=True).items == (Item("first", 0.2),)
    assert {name: value for name, value, _ in flatten(given)}["items"] == to_dict(given)["items"]


def test_plain_values_and_dotted_names():
    assert to_dict(Outer(names=("q",)))["names"] == ["q"]
    names = [name for name, _, _ in flatten(Outer())]
    assert names == ["inner.r", "inner.dropout", "rate", "steps", "kind", "names", "on", "items"]
    assert nest({"inner.r": 4, "rate": 1}) == {"inner": {"r": 4}, "rate": 1}
