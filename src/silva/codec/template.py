"""Renders a chat template as transformers does, with one difference: the date is fixed.

The environment has what chat templates rely on: trimmed blocks, `break` and `continue`, the `generation` tag, a
`tojson` that leaves HTML characters alone, `raise_exception` and `strftime_now`. Templates run in jinja's immutable
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from silva.types import ConfigError, TransitionRefused

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""What running a template on data may raise."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks assistant text in training templates. Here it renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled chat template, or the two that some tokenizers carry (`default` and `tool_use`)."""

    def __init__(self, source: str | Mapping[str, str], *, specials: Mapping[str, object], now: datetime):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        names: Any = environment  # jinja types its tables loosely
        names.filters["tojson"] = _tojson
        names.globals.update(raise_exception=_raise_exception, strftime_now=now.strftime)
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources and "tool_use" not in sources:
            raise ConfigError(f"the tokenizer names the chat templates {sorted(sources)}, but none is called 'default'")
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        self._specials = dict(specials)

    def render(
        self,
        messages: list[object],
        *,
        tools: list[object] | None,
        kwargs: Mapping[str, object],
        generation_prompt: bool,
    ) -> str:
        """The text of the conversation. TransitionRefused, with the template's own words, where it refuses."""
        use = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(use) or next(iter(self._templates.values()))
        context = {**self._specials, **kwargs}
        context.update(messages=messages, tools=tools, documents=context.get("documents"))
        context["add_generation_prompt"] = generation_prompt
        try:
            return template.render(context)
        except RecursionError as error:
            raise TransitionRefused("the chat template cannot render this: the data is nested too deeply") from error
        except TEMPLATE_ERRORS as error:
            words = str(error) or type(error).__name__
            raise TransitionRefused(f"the chat template refuses this conversation: {words}", raised=True) from error
