"""From command line and TOML file to a checked RunConfig, and back to a TOML file."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from silva.config.options import GROUPS, LATER, RunConfig, later_sentence
from silva.types import ConfigError, OptionInfo, flag_of

MAX_WHOLE = (1 << 63) - 1
"""What TOML, and every library that takes such a number, can represent."""
MAX_NUMBER = 1e30
"""Options meet float32, which ends at 3e38: a larger one times 0 would become a NaN."""

_UNSET = object()
_LIMITS: Mapping[type, float] = {int: MAX_WHOLE, float: MAX_NUMBER}
_TEXT = r"\A[^\x00\ud800-\udfff]*\Z"
"""What paths, environments and TOML can contain: bytes of the command line that are not UTF-8 arrive as surrogates."""
_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT", dict: "JSON"}
_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "a text in UTF-8 without NUL",
    bool: "true or false",
    dict: "a JSON object",
}
_MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of the union, made of its field.

    Example: `--rollout-stop-token-ids` has kind `list`, item `int`, no choices, default `[]`.
    """

    name: str
    info: OptionInfo
    help: str
    """One sentence, with the unit: the text below the field."""
    default: object
    kind: type
    """int, float, bool, str (a choice too), list or dict."""
    item: type
    """The type of the items of a list; else `kind`."""
    choices: tuple[str, ...]
    """All values allowed; empty where any value of the type may be allowed."""

    @property
    def accepted(self) -> object:
        """The type that msgspec converts a value to, with its bounds."""
        item: object = self.item
        if self.choices:
            item = Annotated[str, msgspec.Meta(pattern=rf"\A({'|'.join(map(re.escape, self.choices))})\Z")]
        elif self.item is str:
            item = Annotated[str, msgspec.Meta(pattern=_TEXT, min_length=int(self.kind is str))]
        elif (limit := _LIMITS.get(self.item)) is not None:
            low, above = self.info.low, self.info.above
            lower = msgspec.Meta(ge=-limit if low is None else low) if above is None else msgspec.Meta(gt=above)
            upper = msgspec.Meta(le=limit if self.info.high is None else self.info.high)
            item = Annotated[self.item, lower, upper]
        return list[item] if self.kind is list else item

    def allowed(self, *, limit: bool = False) -> str:
        """What a value must be, in words; with `limit`, also the magnitude that no number may exceed."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds: list[str] = []
        if self.info.above is not None:
            bounds.append(f"above {self.info.above:g}")
        if self.info.low is not None:
            bounds.append(f"of at least {self.info.low:g}")
        high = _LIMITS.get(self.item) if limit and self.info.high is None else self.info.high
        if high is not None:
            bounds.append(f"at most {high if self.item is int else f'{high:g}'}")
        words = " ".join((_WORDS[self.item], " and ".join(bounds))).strip()
        if self.kind is list:
            return f"a list, each item {words}"
        return f"{words} that is not empty" if self.kind is str else words


class _Extend(argparse.Action):
    """Gathers the items of a list option over all its uses: a second `--agent-env` takes nothing from the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is _UNSET else before), *(values or ())])


@cache
def options() -> Mapping[str, Option]:
    """Every built option by name, in the order of the help page."""
    types, defaults = get_type_hints(RunConfig), RunConfig()
    infos: dict[str, OptionInfo] = {item.name: item.metadata["option"] for item in fields(RunConfig)}
    texts = {name: text for cls in RunConfig.__mro__[1:-1] for name, text in _help_texts(cls).items()}
    declared = [name for cls in RunConfig.__mro__ for name in vars(cls).get("__annotations__", ())]
    declared.sort(key=lambda name: GROUPS.index(infos[name].group))
    return {name: _option(name, infos[name], texts[name], types[name], getattr(defaults, name)) for name in declared}


def _help_texts(cls: type) -> dict[str, str]:
    """The text below each field of an options class, by the field's name, on one line."""
    body = next(
        node.body
        for node in ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    texts: dict[str, str] = {}
    for field_node, text in pairwise(body):
        if not (isinstance(field_node, ast.AnnAssign) and isinstance(field_node.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field_node.target.id] = " ".join(str(text.value.value).split())
    return texts


def _option(name: str, info: OptionInfo, text: str, annotation: object, default: object) -> Option:
    parts = get_args(annotation)
    plain = next(part for part in parts if part is not NoneType) if NoneType in parts else annotation
    kind = get_origin(plain) or plain
    choices = info.choices or (() if isinstance(kind, type) else get_args(plain))
    kind = kind if isinstance(kind, type) else str
    item = get_args(plain)[0] if kind is list else kind
    return Option(name=name, info=info, help=text, default=default, kind=kind, item=item, choices=choices)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command every option, in groups; those whose part is not built are listed in a group of their own."""
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for option in options().values():
        _add_flag(groups[option.info.group], option)
    later = parser.add_argument_group("not built yet (refused)")
    for name, (count, part) in LATER.items():
        action = "store_true" if count == "0" else "store"
        later.add_argument(flag_of(name), dest=name, default=_UNSET, action=action, help=f"Belongs to {part}.")


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    info, default = option.info, option.default
    named = default is None or default is False or isinstance(default, list | dict) or "default" in option.help
    shown = "" if named else f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    more: dict[str, Any] = {"dest": option.name, "default": _UNSET, "help": (option.help + shown).replace("%", "%%")}
    if option.kind is bool:
        more["action"] = argparse.BooleanOptionalAction
    elif option.kind is list:
        more |= {"nargs": "+", "action": _Extend, "metavar": info.metavar}
    else:
        choices = "{" + ",".join(option.choices) + "}" if option.choices else None
        more["metavar"] = info.metavar or choices or _METAVARS[option.kind]
    group.add_argument(flag_of(option.name), **more)


def resolve(namespace: argparse.Namespace, *, base: Mapping[str, object] | None = None) -> RunConfig:
    """The options in force: `base` (a resumed run's), then the `--config` file, then the command line.

    Raises ConfigError that names the option, its value and what is allowed.
    """
    given = {name: value for name, value in vars(namespace).items() if value is not _UNSET}
    from_file = {} if given.get("config") is None else read_config_file(Path(given["config"]))
    for name in LATER:
        if name in given:
            raise ConfigError(later_sentence(name))
    from_line = {name: given[name] for name in options() if name in given}
    return from_values({**(base or {}), **from_file, **from_line})


def read_config_file(path: Path) -> dict[str, object]:
    """Options of a TOML file by name. Raises ConfigError for an unreadable file or an unknown key."""
    try:
        values: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except ValueError as error:  # of a number with thousands of digits it is no TOMLDecodeError
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    refuse_unknown(values, f"config file {path}")
    return values


def refuse_unknown(values: Mapping[str, object], where: str) -> None:
    """Raise ConfigError, naming `where` and a close option, for a name that is no option."""
    for name in values:
        if name in LATER:
            raise ConfigError(f"{where}: {later_sentence(name)}")
        if name not in options():
            close = difflib.get_close_matches(name, list(options()), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            if isinstance(values[name], dict):
                hint += "; tables are not used here, put the options at the top of the file"
            raise ConfigError(f"{where}: unknown option {name!r}{hint}")


def from_values(values: Mapping[str, object]) -> RunConfig:
    """A RunConfig of raw values (text from the command line, TOML values from a file), each checked."""
    checked = {name: _read(options()[name], value) for name, value in values.items() if value is not None}
    return msgspec.convert(checked, RunConfig)


def write_config_file(config: RunConfig, path: Path) -> None:
    """The resolved options as TOML; options that are not set are left out."""
    values = {name: value for name, value in asdict(config).items() if value is not None}
    path.write_text(tomli_w.dumps(values), encoding="utf-8")


def _read(option: Option, value: object) -> object:
    flag = flag_of(option.name)
    if option.kind is dict and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag} is {value!r}; it must be a JSON object ({error})") from error
    if option.kind is list and isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if value in option.info.later_choices:
        use = " or ".join(filter(None, (", ".join(option.choices[:-1]), option.choices[-1])))
        raise ConfigError(f"{flag} {value} is not built in this version of Silva yet; use {use}")
    # the command line writes numbers as text; a file must write a number as a number and true as true
    strict = option.kind is bool or not isinstance(value, str | list)
    try:
        return msgspec.convert(value, option.accepted, strict=strict)
    except msgspec.ValidationError as error:
        close = difflib.get_close_matches(str(value), option.choices, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        # the limit of all numbers is named only where a number exceeded it
        allowed = option.allowed(limit="<=" in str(error))
        shown = repr(value) if len(repr(value)) <= _MAX_SHOWN else repr(value)[:_MAX_SHOWN] + "..."
        raise ConfigError(f"{flag} is {shown}{hint}; it must be {allowed}") from error
