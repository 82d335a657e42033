"""Random conversations, in our types and in the form that transformers takes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from oracles import Family

from silva.types.messages import Conversation, Message, ToolCall

_BITS = (
    "hello there",
    "  two blanks",
    "tail  ",
    "\n\nparagraph\n",
    "line\r\nline",
    "ne\u0301e et \u00e9t\u00e9",
    "\u0301combining first",
    "\u00a0nbsp\u00a0",
    "\u2003em\u2003",
    "漢字かな交じり",
    "👩\u200d👩\u200d👧 ok",
    "\u202bשלום عربي\u202c",
    "x = {'a': 1} # <b>&amp;</b>",
    'say "hi" \\ back\\nslash',
    "12345 67.8e9 ½",
    "\tdef f():\n\t\treturn [i for i in range(10)]",
    "don't I'll we've",
    "```py\nprint(1)\n```",
    "{{ not_jinja }} {% if %}",
    ".",
)
_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Weather of a "place" <now> & later\n(use it).',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where? é 漢"},
                    "days": {"type": "integer", "description": "How many", "default": 3},
                    "unit": {"type": "string", "enum": ["C", "°F"]},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run-code",
            "description": "Runs code",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    },
)
_SAMPLED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass
class Episode:
    """`root`, then alternating sampled answers and the messages that follow each."""

    conversation: Conversation
    root: list[Message]
    turns: list[tuple[Message, list[Message]]]


class Maker:
    """Makes random episodes that a family's template accepts. `inject` mixes these texts into contents."""

    def __init__(self, family: Family, seed: int, inject: tuple[str, ...] = ()):
        self.family = family
        self.rng = random.Random(seed)
        self.inject = inject
        self.num_calls = 0

    def text(self, num: int = 3) -> str:
        bits = self.rng.choices(_BITS + self.inject * 4, k=self.rng.randint(1, num))
        return self.rng.choice(("", " ", "\n")).join(bits)

    def user(self) -> Message:
        return Message(role="user", content=self.text())

    def answer(self, *, calls: bool) -> Message:
        rng = self.rng
        reasoning = self.text(2) if self.family.reasoning and rng.random() < 0.5 else ""
        content = rng.choice(_SAMPLED) + self.text() + rng.choice(_SAMPLED)
        if not calls:
            return Message(role="assistant", content=content, reasoning=reasoning)
        num = rng.randint(1, 3) if self.family.parallel else 1
        made = tuple(self._call() for _ in range(num))
        mixed = rng.random() < 0.3 and self.family.template != "mistralai-Mistral-Nemo-Instruct-2407"
        return Message(role="assistant", content=content if mixed else "", reasoning=reasoning, tool_calls=made)

    def _call(self) -> ToolCall:
        self.num_calls += 1
        rng = self.rng
        name = rng.choice(("get_weather", "run-code"))
        arguments: dict[str, Any] = {"place": self.text(2), "days": rng.choice((1, -2.5, True, None, [1, "two"]))}
        if rng.random() < 0.3:
            arguments["nested"] = {"a b": self.text(1), "list": [{"x": ""}, " "]}
        call_id = f"abcd{self.num_calls:05d}" if self.family.nine_ids else f"call_{self.num_calls:016x}"
        return ToolCall(id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=rng.random() < 0.5))

    def after(self, answer: Message, *, tools: bool) -> list[Message]:
        if not answer.tool_calls:
            return [self.user()]
        results = [Message(role="tool", content=self.text(), tool_call_id=call.id) for call in answer.tool_calls]
        if self.rng.random() < 0.2:
            results.reverse()
        extra = self.family.user_with_tools and self.rng.random() < 0.2
        return [*results, self.user()] if extra else results

    def tools(self) -> tuple[dict[str, Any], ...]:
        return _TOOLS[: self.rng.randint(1, 2)]

    def episode(self) -> Episode:
        rng, family = self.rng, self.family
        with_tools = family.tools and rng.random() < 0.6
        tools = self.tools() if with_tools else ()
        root = [Message(role="system", content=self.text())] if family.system and rng.random() < 0.5 else []
        root.append(self.user())
        if rng.random() < 0.25 and (family.user_with_tools or not with_tools):  # a worked example in the prompt
            root += [self.answer(calls=False), self.user()]
        turns: list[tuple[Message, list[Message]]] = []
        for _ in range(rng.randint(1, 4)):
            calls = with_tools and (rng.random() < 0.7 or not family.user_with_tools)
            answer = self.answer(calls=calls)
            turns.append((answer, self.after(answer, tools=with_tools)))
        return Episode(Conversation(tools=tools, template_kwargs={}), root, turns)


def to_hf(message: Message, *, blank_content: bool = False) -> dict[str, Any]:
    """The message for apply_chat_template: arguments as a mapping, absent text of a call turn left out or blank."""
    chat = message.to_chat()
    if blank_content:
        chat["content"] = message.content
    for call in chat.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chat
