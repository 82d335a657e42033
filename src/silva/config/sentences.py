"""Sentences that refuse combinations of options.

A check is a generator: it yields a sentence for each thing that is wrong. In a sentence, `{lr}` is the place of the
option with its value; texts of the user stand only in such places, since they may have braces themselves.

    def _distillation(c: RunConfig) -> Iterator[str]:
        if c.opd_teacher and not c.opd_coef:
            yield "{opd_teacher} does nothing without --opd-coef above 0"

refuses `--opd-teacher t` alone: "--opd-teacher t does nothing without --opd-coef above 0".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from silva.config.options import RunConfig
from silva.types import ConfigError, flag_of

_DEFAULTS = RunConfig()
_NAMES = [item.name for item in fields(RunConfig)]


@dataclass(frozen=True, slots=True)
class _Shown:
    """An option in a sentence: `{lr}` is `--lr 0.1`, `{lr.value}` is `0.1`, `{use_tis}` is `--use-tis`."""

    flag: str
    value: object

    def __format__(self, spec: str) -> str:
        return self.flag if self.value is True else f"{self.flag} {self.value:{spec}}"


def is_set(config: RunConfig, name: str) -> bool:
    """The option has another value than its default."""
    return getattr(config, name) != getattr(_DEFAULTS, name)


def filled(config: RunConfig, sentences: Iterable[str]) -> Iterator[str]:
    """The sentences with the options in their places."""
    shown = {name: _Shown(flag_of(name), getattr(config, name)) for name in _NAMES}
    return (sentence.format(**shown) for sentence in sentences)


def refuse(config: RunConfig, sentences: Iterable[str]) -> None:
    """Raise ConfigError with the first of the sentences; nothing where there is none."""
    for sentence in filled(config, sentences):
        raise ConfigError(sentence)
