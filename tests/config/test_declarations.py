"""Options are declared once, in the room that uses them, with all that help and parsing need."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass

import pytest

import silva
from silva.config.options import RunConfig
from silva.config.parse import options
from silva.forest.profiles import PROFILES

CLASSES = [cls for cls in RunConfig.__mro__[1:-1] if vars(cls).get("__annotations__")]
MAX_FIELDS = 20


def test_every_option_has_one_class_outside_the_union() -> None:
    declared = [name for cls in CLASSES for name in vars(cls)["__annotations__"]]
    assert sorted(declared) == sorted(item.name for item in fields(RunConfig)) and len(set(declared)) == len(declared)
    assert "__annotations__" not in vars(RunConfig)
    for cls in CLASSES:
        room = cls.__module__.split(".")[1]
        assert room != "config" or cls.__module__ == "silva.config.run_options", cls  # no lower room reads these
        assert len(vars(cls)["__annotations__"]) <= MAX_FIELDS, cls


def test_every_options_class_of_the_project_is_in_the_union() -> None:
    for module in pkgutil.walk_packages(silva.__path__, "silva."):
        if module.name.endswith("options"):
            made = vars(importlib.import_module(module.name)).values()
            named = [cls for cls in made if isinstance(cls, type) and cls.__module__ == module.name]
            assert all(issubclass(RunConfig, cls) for cls in named if cls is not RunConfig), module.name


def test_the_help_names_every_profile() -> None:
    assert all(name in options()["agentic_profiles"].help for name in PROFILES)


def test_every_option_says_what_it_takes() -> None:
    for name, option in options().items():
        info = option.info
        assert option.help[0].isupper() or option.help.startswith("silva "), name
        numeric = option.item in (int, float)
        # ids are what a tokenizer says; all other numbers have a lowest value
        assert (info.low is not info.above) == (numeric and option.kind is not list), name
        assert numeric or info.high is None, name
        assert info.metavar is not None or option.kind is not list, name
        if option.choices:
            assert option.default is None or option.default in option.choices, name
            assert not set(option.choices) & set(info.later_choices), name


def test_no_other_class_repeats_the_default_of_an_option() -> None:
    """A field that is an option comes from the class that declares it, so that its default is written once."""
    pytest.importorskip("torch")
    told = {name: option.default for name, option in options().items() if option.default not in (None, False)}
    for module in pkgutil.walk_packages(silva.__path__, "silva."):
        if module.name.endswith(("__main__", "runner", "user_worker")):  # programs
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if not (isinstance(cls, type) and cls.__module__ == module.name and is_dataclass(cls)) or cls in CLASSES:
                continue
            own = vars(cls).get("__annotations__", {})
            again = [
                item.name
                for item in fields(cls)
                if item.name in own and item.name in told and told[item.name] == item.default
            ]
            assert not again, f"{cls} gives {again} the default of the option once more"
