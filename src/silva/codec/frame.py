"""One way of calling a chat template: a set of tools and template arguments, and all that was learned about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from silva.codec.encoder import ControlToken, Part, TokenText
from silva.codec.images import IMAGE_PARTS, ImageForm, check_images, mark_of
from silva.codec.lru import Lru
from silva.codec.slots import (
    CONTEXT,
    FRAME,
    CallStyle,
    DefinitionBuilder,
    Hole,
    ShapeBuilder,
    Slots,
    Words,
    materialise,
    owner,
    text_part,
)
from silva.codec.template import ChatTemplate
from silva.codec.transforms import NUM_PROBES, Skeleton, Transform, explain, probes
from silva.types import JsonObject, Message, ToolCall, TransitionRefused

TextOf = Callable[[Hole], str]
Pieces = list["str | Hole"]

_LONG_ID, _NINE_ID = "call_0123456789abcdef", "a1b2c3d4e"


def placeholder(hole: Hole) -> str:
    return hole.placeholder


def lookup(*regions: Sequence[str]) -> TextOf:
    """What gives the text (or kind) of a hole from one list per region, in the order FRAME, CONTEXT, NEW."""
    return lambda hole: regions[hole.region][hole.index]


class Frame:
    """Renders shapes with this frame's tools and arguments, and keeps what was learned.

    Thread-safe without a lock: threads that learn the same thing at once find the same, and none waits for another.
    """

    def __init__(
        self,
        template: ChatTemplate,
        text: TokenText,
        words: Words,
        tools: Sequence[JsonObject],
        kwargs: JsonObject,
    ):
        self.template = template
        self.text = text
        self.words = words
        self.slots = Slots(FRAME)
        build = DefinitionBuilder(self.slots, words)
        self._tools = [build.value(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None
        self._kwargs = {key: build.value(value, f"chat_template_kwargs.{key}") for key, value in kwargs.items()}
        self.tool_name = next((str(name) for tool in tools if (name := _name_of(tool))), "lookup")
        self.inert = [text.inert(value) for value in self.slots.values]
        self._images: dict[str, ImageForm | None] = {}
        self._lists = False
        self._plain_side = self._side(placeholder)
        self._inert_side = self._side(lambda hole: self.inert[hole.index])
        self.transforms: Lru[tuple[str, str, str], Transform] = Lru(2048)
        self.roots: Lru[str, Any] = Lru(256)
        self.deltas: Lru[str, Any] = Lru(512)
        self.impure: Lru[str, Any] = Lru(512)
        self.wholes: Lru[bytes, Any] = Lru(16)
        self._lists = self._wants_lists()

    def _side(self, text_of: TextOf) -> tuple[list[object] | None, JsonObject]:
        return materialise(self._tools, text_of), materialise(self._kwargs, text_of)

    def render(
        self, messages: Sequence[object], text_of: TextOf = placeholder, *, gen: bool, inert: bool = False
    ) -> str:
        """The shape's text. With `inert`, the frame's holes get their real (inert) texts, else those of `text_of`."""
        if inert:
            tools, kwargs = self._inert_side
        elif text_of is placeholder or not self.slots.values:
            tools, kwargs = self._plain_side
        else:
            tools, kwargs = self._side(text_of)
        filled = materialise(list(messages), text_of)
        if self._lists:
            filled = [_with_list(message) for message in filled]
        return self.template.render(filled, tools=tools, kwargs=kwargs, generation_prompt=gen)

    def without_tools(self) -> Frame:
        """The same frame with the same knowledge, whose renders receive no tools."""
        other = copy(self)
        other.style, other._tools = self.style, None
        other._plain_side, other._inert_side = (None, self._plain_side[1]), (None, self._inert_side[1])
        return other

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    def texts(self, context: Sequence[str], new: Sequence[str]) -> TextOf:
        """The texts of all holes. `context` and `new` are those of these regions."""
        return lookup(self.slots.values, context, new)

    def inert_texts(self, context: Sequence[str], new: Sequence[str]) -> TextOf:
        """The same with a harmless letter in place of each control token's text."""
        return lookup(self.inert, *(list(map(self.text.inert, texts)) for texts in (context, new)))

    def builder(self, slots: Slots) -> ShapeBuilder:
        """What turns messages into shapes for this frame; their texts gather in `slots`."""
        build = ShapeBuilder(slots, self.words, self.style, self.image_part)
        for i, value in enumerate(self.slots.values):  # a call's name is the hole that its definition has
            build.slots.share(value, "name", Hole(FRAME, i))
        return build

    def _wants_lists(self) -> bool:
        """Whether the template shows a text in a list of parts only (some vision templates ignore strings)."""
        hole = Hole(CONTEXT, 0)
        turn = {"role": "user", "content": hole}
        if hole.placeholder in self.try_render([turn]):
            return False
        return hole.placeholder in self.try_render([{**turn, "content": [text_part(hole)]}])

    def try_render(self, turns: Sequence[object], *, gen: bool = False) -> str:
        """The text of these turns; empty where the template refuses them."""
        try:
            return self.render(turns, gen=gen)
        except TransitionRefused:
            return ""

    def image_part(self, role: str) -> JsonObject | None:
        """What the template takes for an image in a message of this role; None: it takes none there."""
        form = self._image_form(role)
        return None if form is None else form.part

    def _image_form(self, role: str) -> ImageForm | None:
        if role not in self._images:
            self._images[role] = self._find_image_form(role)
        return self._images[role]

    def _find_image_form(self, role: str) -> ImageForm | None:
        texts = [text_part(Hole(CONTEXT, i)) for i in range(2)]
        for part in IMAGE_PARTS:
            whole, without = (
                self.try_render(self._small_chat(role, parts)) for parts in ([texts[0], part, texts[1]], texts)
            )
            shown = all(Hole(CONTEXT, i).placeholder in render for i in range(2) for render in (whole, without))
            mark = mark_of(whole, without, self.text) if shown else None
            if mark is not None:
                return ImageForm(part, mark)
        return None

    def _small_chat(self, role: str, content: list[JsonObject]) -> list[JsonObject]:
        """A conversation in which a message of this role has this content."""
        turn: JsonObject = {"role": role, "content": content}
        user: JsonObject = {"role": "user", "content": "u"}
        if role != "tool":
            return [turn, user] if role == "system" else [turn]
        calling = self.style.calling_turn(_NINE_ID, self.tool_name, "{}" if self.style.arguments_as_text else "b")
        return [user, calling, {**turn, "tool_call_id": _NINE_ID}]

    def check_images(self, pieces: Pieces, tree: Sequence[JsonObject]) -> None:
        """Raise TransitionRefused unless the render `pieces` contains each image of the messages once."""
        if any(isinstance(message.get("content"), list) for message in tree):
            forms = {message["role"]: self._image_form(message["role"]) for message in tree}
            check_images(pieces, tree, {role: form for role, form in forms.items() if form is not None})

    @cached_property
    def style(self) -> CallStyle:
        """How this template takes calls; found at first use."""
        forms = [(nine, text, empty) for nine in (False, True) for text in (False, True) for empty in (None, "")]
        for num_turns in (3, 2):
            for nine, text, empty in forms:
                style = CallStyle(arguments_as_text=text, empty_content=empty, nine_ids=nine)
                if self._around_arguments(style, num_turns) is not None:
                    return self._with_raw(style, num_turns)
        return CallStyle(empty_content="")

    def _with_raw(self, style: CallStyle, num_turns: int) -> CallStyle:
        around = self._around_arguments(replace(style, arguments_as_text=True), num_turns)
        raw = around is not None and not (around[0].endswith('"') and around[1].startswith('"'))
        return replace(style, takes_raw=raw)

    def _around_arguments(self, style: CallStyle, num_turns: int) -> tuple[str, str] | None:
        """The text before and after a call's arguments, None where the template refuses the call or hides them.

        We render a user turn, the call and, with three turns, its result.
        """
        build = ShapeBuilder(Slots(CONTEXT), self.words, style)
        call_id = _NINE_ID if style.nine_ids else _LONG_ID
        arguments = "{}" if style.arguments_as_text else '{"a": "b"}'
        call = ToolCall(id=call_id, name=self.tool_name, arguments=arguments)
        tree = [
            build.message(Message(role="user", content="u")),
            build.message(Message(role="assistant", tool_calls=(call,))),
            build.message(Message(role="tool", content="r", tool_call_id=call_id)),
        ]
        values = build.slots.values
        mark = build.slots.kinds.index("arguments" if style.arguments_as_text else "argument")

        def text_of(hole: Hole) -> str:  # the id is shown as it is: some templates look at its form
            shown = hole.region == CONTEXT and build.slots.kinds[hole.index] == "id"
            return values[hole.index] if shown else hole.placeholder

        try:
            text = self.render(tree[:num_turns], text_of, gen=False)
        except TransitionRefused:
            return None
        before, found, after = text.partition(Hole(CONTEXT, mark).placeholder)
        return (before, after) if found else None

    def learn(
        self,
        pieces: Pieces,
        kinds: TextOf,
        render: Callable[[TextOf], str],
        tree: Sequence[JsonObject],
        *,
        cached: bool,
    ) -> list[Transform]:
        """The transform of each hole of `pieces`, in order. TransitionRefused, with the place in `tree` or the tools.

        `render` renders the same text with other texts in the holes. With `cached`, what was learned in the same
        surroundings before is used again, and the caller's proof has to confirm it.
        """
        holes = [(i, pieces[i]) for i in range(1, len(pieces), 2)]
        keys = [_surroundings(kinds(hole), pieces, i) for i, hole in holes if isinstance(hole, Hole)]
        known = [self.transforms.get(key) for key in keys] if cached else [None]
        if all(transform is not None for transform in known):
            return [transform for transform in known if transform is not None]
        probed = {hole for _, hole in holes if isinstance(hole, Hole) and kinds(hole) != "id"}
        renders = [render(_prober(probed, k)) for k in range(NUM_PROBES)]
        found = explain(pieces, renders, probed)
        if isinstance(found, Hole):
            raise TransitionRefused(
                "the chat template changes a text in a way that is neither trimming nor JSON, so its tokens cannot be "
                "separated from the template's own",
                field=owner(tree, found) or ("tools" if repr(found) in repr(self._tools) else None),
            )
        for key, transform in zip(keys, found, strict=True):
            self.transforms.put(key, transform)
        return found

    def items(self, skeleton: Skeleton) -> list[Part | ControlToken]:
        """The skeleton with its literals cut at control tokens."""
        out: list[Part | ControlToken] = []
        for part in skeleton:
            out.extend(self.text.split(part) if isinstance(part, str) else [part])
        return out


def _prober(probed: set[Hole], k: int) -> TextOf:
    return lambda hole: probes(hole)[k] if hole in probed else hole.placeholder


def _surroundings(kind: str, pieces: Pieces, i: int) -> tuple[str, str, str]:
    before, after = pieces[i - 1], pieces[i + 1]
    assert isinstance(before, str) and isinstance(after, str)
    return kind, before[-12:], after[:8]


def _with_list(message: JsonObject) -> JsonObject:
    content = message.get("content")
    return {**message, "content": [text_part(content)]} if isinstance(content, str) else message


def _name_of(tool: JsonObject) -> str:
    inner = tool.get("function", tool)
    name = cast("JsonObject", inner).get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else ""
