"""Requests that are refused before they are encoded: too long for any context, or with images nobody could see."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from silva.codec import TurnCodec
from silva.forest import Match
from silva.inference import ImageSupport
from silva.types import RequestError, images_of
from silva.wire import ModelRequest

SLACK = 4
"""Factor for templates and normalizers that shorten text."""
PLAUSIBLE_CHARS = 8
"""Characters per token above which a text is checked: ordinary text has half as many."""
SLICE_CHARS = 1 << 14


def refuse_hopeless(
    request: ModelRequest, match: Match, *, limit: int, longest_token: int, encode: Callable[[str], list[int]]
) -> None:
    """Raise RequestError where the request's new part cannot fit into `limit` tokens.

    The checks are, in order of cost: the number of messages, calls and images (each takes at least a token), the number
    of characters (no token has more than `longest_token`), and, where both leave a doubt, the tokens of the texts in
    slices, up to twice the limit. Tools and template arguments count where the conversation is new.
    """
    messages = request.messages_between(match.num_matched, match.num_messages)
    calls = [call for message in messages for call in message.tool_calls]
    num_parts = len(messages) + len(calls) + len(images_of(messages))
    if num_parts > limit:
        words = f"the new messages of this request are {num_parts}, calls and images included"
        raise _too_long(limit, words, "messages")
    texts = [message.content for message in messages] + [message.reasoning for message in messages]
    texts += [call.name for call in calls] + [call.arguments for call in calls]
    parts = [("the new messages", "messages", texts)]
    if match.num_matched == 0:
        conversation = request.conversation
        for field, value in (("tools", conversation.tools), ("chat_template_kwargs", conversation.template_kwargs)):
            parts.append((f"the {field}", field, [msgspec.json.encode(value).decode()] if value else []))
    for words, field, texts in parts:
        num_chars = sum(map(len, texts))
        what = f"{words} of this request have {num_chars} characters"
        if num_chars > SLACK * longest_token * limit and num_chars > PLAUSIBLE_CHARS * limit:
            raise _too_long(limit, what, field)
        if num_chars > PLAUSIBLE_CHARS * limit and _num_tokens(texts, encode, most=2 * limit) > 2 * limit:
            raise _too_long(limit, f"{what} in more than {2 * limit} tokens", field)


def refuse_images(request: ModelRequest, match: Match, codec: TurnCodec, support: ImageSupport) -> None:
    """Raise RequestError, with the image's path, where the engine could not see an image of the new messages."""
    if support == "any":
        return
    for index, message in enumerate(request.messages_between(match.num_matched, match.num_messages), match.num_matched):
        if not message.parts:
            continue
        if support == "none":
            why = "the model of this run reads text only"
        elif not codec.shows_images(message.role, request.conversation):
            why = f"the model's chat template has no place for images in {message.role} messages"
        else:
            continue
        at = request.images.path_of(message.images[0], request.path_of(index))
        raise RequestError(f"{at} is an image, but {why}", field=at, code="unsupported_content")


def _num_tokens(texts: list[str], encode: Callable[[str], list[int]], *, most: int) -> int:
    """The tokens of texts, encoded in slices; counted only until there are more than `most`."""
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), SLICE_CHARS):
            num_tokens += len(encode(text[start : start + SLICE_CHARS]))
            if num_tokens > most:
                return num_tokens
    return num_tokens


def _too_long(limit: int, what: str, field: str) -> RequestError:
    return RequestError(
        f"the context holds {limit} tokens; {what}, which can never fit. Shorten them",
        field=field,
        code="context_length_exceeded",
    )
