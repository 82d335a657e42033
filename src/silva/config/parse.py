"""From command line and TOML file to a checked RunConfig, and back to a TOML file."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any

import tomli_w

from silva.config.options import LATER, RunConfig, later_sentence
from silva.config.training_options import TrainingOptions
from silva.types.errors import ConfigError
from silva.types.option import OptionInfo, flag_of

_UNSET: Any = object()

MAX_WHOLE = (1 << 63) - 1
"""What TOML, and every library that takes such a number, can hold."""
MAX_NUMBER = 1e30
"""Options meet float32, which ends at 3e38: where a larger one would meet a 0 there, it made a NaN."""

_METAVARS = {"int": "N", "float": "X", "str": "TEXT", "json": "JSON"}


class _Extend(argparse.Action):
    """Gathers the items of a list option over all its uses: a second `--agent-env` takes nothing from the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        held = getattr(namespace, self.dest)
        setattr(namespace, self.dest, list(values) if held is _UNSET else [*held, *values])


def option_fields() -> dict[str, tuple[Field[Any], OptionInfo]]:
    """Every built option by name."""
    return {item.name: (item, item.metadata["option"]) for item in fields(RunConfig)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command every option, in groups; those whose part is not built stand in a group of their own."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    options = option_fields().items()
    # inherited fields come first in a class; the help starts with its own all the same
    inherited = {item.name for item in fields(TrainingOptions)}
    for name, (item, info) in sorted(options, key=lambda option: option[0] in inherited):
        if info.group not in groups:
            groups[info.group] = parser.add_argument_group(info.group)
        _add_flag(groups[info.group], name, item, info)
    later = parser.add_argument_group("not built yet (refused)")
    for name, (count, part) in LATER.items():
        nargs: dict[str, Any] = {"0": {"action": "store_true"}, "+": {"nargs": "+"}}.get(count, {})
        later.add_argument(flag_of(name), dest=name, default=_UNSET, help=f"Belongs to {part}.", **nargs)


def _add_flag(group: argparse._ArgumentGroup, name: str, item: Field[Any], info: OptionInfo) -> None:
    default = None if item.default is MISSING else item.default
    untold = default is None or default is False or "default" in info.help
    shown = "" if untold else f" (default: {default:g})" if info.kind == "float" else f" (default: {default})"
    more: dict[str, Any] = {"dest": name, "default": _UNSET, "help": (info.help + shown).replace("%", "%%")}
    if info.kind == "bool":
        group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **more)
        return
    if info.kind in ("list", "intlist"):
        more["nargs"], more["action"] = "+", _Extend
    if info.kind == "choice" and info.metavar is None:
        more["metavar"] = "{" + ",".join(info.choices) + "}"
    elif info.metavar or info.kind in _METAVARS:
        more["metavar"] = info.metavar or _METAVARS[info.kind]
    group.add_argument(flag_of(name), **more)


def resolve(namespace: argparse.Namespace, *, base: Mapping[str, Any] | None = None) -> RunConfig:
    """The options in force: `base` (a resumed run's), then the `--config` file, then the command line.

    Raises ConfigError that names the option, its value and what is allowed.
    """
    values: dict[str, Any] = dict(base or {})
    config_path = getattr(namespace, "config", None)
    if config_path is not None:
        values.update(read_config_file(Path(config_path)))
    for name in LATER:
        if getattr(namespace, name, _UNSET) is not _UNSET:
            raise ConfigError(later_sentence(name))
    for name in option_fields():
        given = getattr(namespace, name, _UNSET)
        if given is not _UNSET:
            values[name] = given
    return from_values(values)


def read_config_file(path: Path) -> dict[str, Any]:
    """Options of a TOML file by name. Raises ConfigError for an unreadable file or an unknown key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except ValueError as error:  # of a number with thousands of digits it is no TOMLDecodeError
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    known = option_fields()
    for name in values:
        if name in LATER:
            raise ConfigError(f"config file {path}: {later_sentence(name)}")
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            if isinstance(values[name], dict):
                hint += "; tables are not used here, put the options at the top of the file"
            raise ConfigError(f"config file {path}: unknown option {name!r}{hint}")
    return values


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig of raw values (text from the command line, TOML values from a file), each checked."""
    known = option_fields()
    checked = {name: _checked(name, value, known[name][1]) for name, value in values.items() if value is not None}
    return RunConfig(**checked)


def write_config_file(config: RunConfig, path: Path) -> None:
    """The resolved options as TOML; options that are not set are left out."""
    values = {name: value for name, value in asdict(config).items() if value is not None}
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _checked(name: str, value: Any, info: OptionInfo) -> Any:
    readers = {
        "str": _read_text,
        "int": _read_int,
        "float": _read_float,
        "bool": _read_bool,
        "json": _read_object,
        "choice": _read_choice,
        "list": _read_texts,
        "intlist": _read_ints,
    }
    return readers[info.kind](name, value, info)


def _read_text(name: str, value: Any, info: OptionInfo) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a text that is not empty")
    _check_characters(name, value)
    return value


def _check_characters(name: str, value: str) -> None:
    """Refuse what no path, environment or config file can hold, such as bytes of the command line that are no UTF-8."""
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a text in UTF-8 without NUL")


def _read_int(name: str, value: Any, info: OptionInfo) -> int:
    try:
        if isinstance(value, (bool, float)):
            raise ValueError
        number = int(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a whole number") from error
    _check_bounds(name, number, info)
    return number


def _read_float(name: str, value: Any, info: OptionInfo) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a number") from error
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{flag_of(name)} is {reprlib.repr(value)}; it must be a finite number")
    _check_bounds(name, number, info)
    return number


def _check_bounds(name: str, number: float, info: OptionInfo) -> None:
    below = info.low is not None and (number <= info.low if info.low_open else number < info.low)
    if below:
        word = "above" if info.low_open else "at least"
        raise ConfigError(f"{flag_of(name)} is {number}; it must be {word} {info.low:g}")
    if info.high is not None and number > info.high:
        raise ConfigError(f"{flag_of(name)} is {number}; it must be at most {info.high:g}")
    if abs(number) > (MAX_WHOLE if isinstance(number, int) else MAX_NUMBER):
        limit = MAX_WHOLE if isinstance(number, int) else f"{MAX_NUMBER:g}"
        raise ConfigError(f"{flag_of(name)} is {reprlib.repr(number)}; its magnitude must be at most {limit}")


def _read_bool(name: str, value: Any, info: OptionInfo) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be true or false")
    return value


def _read_object(name: str, value: Any, info: OptionInfo) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a JSON object")
    return value


def _read_choice(name: str, value: Any, info: OptionInfo) -> str:
    if value in info.later_choices:
        raise ConfigError(f"{flag_of(name)} {value} is not built in this version of Silva yet; use {_listed(info)}")
    if value not in info.choices:
        close = difflib.get_close_matches(str(value), info.choices, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{flag_of(name)} is {value!r}{hint}; it must be one of {', '.join(info.choices)}")
    return value


def _listed(info: OptionInfo) -> str:
    *first, last = info.choices
    return f"{', '.join(first)} or {last}" if first else last


def _read_texts(name: str, value: Any, info: OptionInfo) -> list[str]:
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a list of texts")
    for item in value:
        _check_characters(name, item)
    return list(value)


def _read_ints(name: str, value: Any, info: OptionInfo) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a list of whole numbers")
    return [_read_int(name, item, info) for item in value]
