"""A turn codec over single characters, exact and small enough to check by eye: ChatML with grouped tool results.

Each character has two ids with the same text (`twin`), so that a test sees whether sampled ids were ever encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from silva.codec import SampledTail, TurnDelta
from silva.types.errors import TransitionRefused
from silva.types.messages import Conversation, Message

START, END, OTHER_END = 1, 2, 3
_SPECIAL = {START: "<|im_start|>", END: "<|im_end|>", OTHER_END: "<|endoftext|>"}
_FIRST, _TWINS = 10, 0x110000


def ids_of(text: str) -> list[int]:
    return [_FIRST + ord(char) for char in text]


def twin(token: int) -> int:
    """The other id with the same text."""
    return token + _TWINS if token < _TWINS else token - _TWINS


def text_of(ids: Iterable[int]) -> str:
    return "".join(_SPECIAL[i] if i in _SPECIAL else chr((i - _FIRST) % _TWINS) for i in ids)


def assistant_text(message: Message, *, in_think: bool = False) -> str:
    """An assistant turn as the Qwen templates write it; `in_think` leaves out the opening mark of the reasoning."""
    text = ""
    if message.reasoning or in_think:
        text = ("" if in_think else "<think>\n") + message.reasoning + "\n</think>\n\n"
    text += message.content
    for index, call in enumerate(message.tool_calls):
        text += "\n" if index or message.content else ""
        text += f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
    return text


@dataclass(frozen=True, kw_only=True)
class CharCodec:
    """`prefill` ends each generation prompt; `join_users` and `join_tools` write neighbours of a kind as one turn."""

    prefill: str = ""
    join_users: bool = False
    join_tools: bool = True

    stop_ids = frozenset({END, OTHER_END})

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(ids)

    def encode_root(self, messages: Sequence[Message], conversation: Conversation) -> TurnDelta:
        head: list[int] = []
        if conversation.tools:
            names = ",".join(tool["function"]["name"] for tool in conversation.tools)
            head = [START, *ids_of(f"system\ntools {names}"), END, *ids_of("\n")]
        return TurnDelta(observation_ids=[*head, *self._turns(messages, at_start=True)], opening_ids=self._opening())

    def encode_delta(self, tail: SampledTail, messages: Sequence[Message], conversation: Conversation) -> TurnDelta:
        close = [END] if tail.cut else []
        ids = [*close, *ids_of("\n"), *self._turns(messages, at_start=False)]
        return TurnDelta(observation_ids=ids, opening_ids=self._opening())

    def _opening(self) -> list[int]:
        return [START, *ids_of("assistant\n" + self.prefill)]

    def _turns(self, messages: Sequence[Message], *, at_start: bool) -> list[int]:
        groups: list[tuple[str, list[str]]] = []
        for index, message in enumerate(messages):
            if message.role == "system" and not (at_start and index == 0):
                raise TransitionRefused("a system message must come first", field=f"messages[{index}].role")
            role, text = message.role, message.content
            if message.role == "assistant":
                text = assistant_text(message)
            joins = (role == "tool" and self.join_tools) or (role == "user" and self.join_users)
            if joins and groups and groups[-1][0] == role:
                groups[-1][1].append(text)
            else:
                groups.append((role, [text]))
        ids: list[int] = []
        for role, texts in groups:
            body = "".join(f"<r>{text}</r>" for text in texts) if role == "tool" else "&".join(texts)
            ids += [START, *ids_of(f"{'user' if role == 'tool' else role}\n{body}"), END, *ids_of("\n")]
        return ids
