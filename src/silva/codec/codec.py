"""The turn codec: messages to token ids for one tokenizer and chat template, turn by turn.

A *root* is the beginning of a conversation up to the first sampled turn; a *delta* is everything between one sampled
turn and the next. In both, the template's own text is separated from the texts of the messages, which go into *slots*:

    root   <|im_start|>user\\n [slot: "hi"] <|im_end|>\\n | <|im_start|>assistant\\n
    sampled                                                  hello <|im_end|>
    delta  \\n<|im_start|>user\\n [slot: "more"] <|im_end|>\\n | <|im_start|>assistant\\n
           observation (mask 0)                              | opening (mask 0)

The skeleton around the slots is learned once per shape of messages, by rendering placeholders. Each slot has the
transform that the template applies to its text (trimming, JSON). Text between two control tokens is encoded in one
piece, by a tokenizer that knows no control tokens. Before ids are used, the recipe is rendered against the template
with the request's own texts; where they differ, the step is refused. A delta that depends on the history is formed from
a render of the whole history (`whole`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from silva.codec import delta as deltas
from silva.codec.check import CodecReport, check_codec
from silva.codec.deltas import SampledTail, TurnDelta
from silva.codec.encoder import TokenText
from silva.codec.ends import TurnEnds, find_ends
from silva.codec.frame import Frame
from silva.codec.late_system import encode_late_system
from silva.codec.lru import Lru
from silva.codec.root import encode_root
from silva.codec.slots import Words
from silva.codec.template import ChatTemplate
from silva.codec.whole import encode_whole
from silva.types import ConfigError, Conversation, JsonObject, Message, Role, TransitionRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_REMEMBERED = 16
_PROBE_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}


class TurnCodec:
    """Turns new messages into token ids, and never encodes sampled ids again.

    The ids of a root and of each delta are those that the chat template's full render would have at that place, but the
    text of users, tools and earlier answers never becomes a control token. What the template does is learned by
    rendering placeholders, once per shape of messages, and proven again on the texts of every request; a step that the
    template refuses raises `TransitionRefused`. Thread-safe.

    Example: with a ChatML template, `encode_delta` behind an answer "hello" that ended with its stop id `<|im_end|>`
    and with the message `user: more` gives `observation_ids` of the text `\\n<|im_start|>user\\nmore<|im_end|>\\n` and
    `opening_ids` of `<|im_start|>assistant\\n`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int] = (),
        default_template_kwargs: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ):
        """Use `load` unless you have a tokenizer. `stop_ids`: those that the model's own files name."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__} without a tokenizer.json; convert it to a fast one "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) with the sentencepiece package installed)"
            )
        source = cast("str | dict[str, str] | None", cast(Any, tokenizer).chat_template)
        if not source:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be turned into tokens; put the model's "
                "template into chat_template.jinja (or `chat_template` of tokenizer_config.json) beside the tokenizer, "
                "or use an instruct checkpoint"
            )
        self.tokenizer = tokenizer
        self.template_source: str = source if isinstance(source, str) else "\n".join(source.values())
        self._text = TokenText(backend)
        self.added_tokens: frozenset[str] = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values()
        )
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        specials = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
        self._template = ChatTemplate(source, specials=specials, now=now or datetime.now())
        self._words = Words.of(self._text.control)
        self._default_kwargs = dict(default_template_kwargs or {})
        self._frames: Lru[bytes, Frame] = Lru(64)
        self._short: Lru[tuple[int, ...], str] = Lru(64)
        self._proven_kwargs: Lru[bytes, bool] = Lru(256)
        eos = tokenizer.eos_token_id
        eos_id = eos if isinstance(eos, int) else None
        configured = {*stop_ids, *([] if eos_id is None else [eos_id])}
        plain = self._make_frame((), self._default_kwargs)
        called = self._make_frame((_PROBE_TOOL,), self._default_kwargs)
        self.ends: TurnEnds = find_ends(plain, called, self._text, configured, eos_id)
        self.stop_ids: frozenset[int] = self.ends.stop_ids
        if not self.stop_ids:
            raise ConfigError(
                "nothing ends an assistant turn: the tokenizer has no eos token, the model's files name none, and the "
                "chat template writes no special token after an assistant turn; set eos_token_id in its config files"
            )

    @classmethod
    def load(
        cls,
        hf_dir: str | Path,
        *,
        default_template_kwargs: dict[str, object] | None = None,
        now: datetime | None = None,
    ) -> TurnCodec:
        """The codec of a checkpoint folder: its tokenizer, chat template and eos ids.

        `default_template_kwargs` are chat template arguments that each conversation may override; `now` is the date
        that templates see, for the life of the codec. ConfigError where the folder cannot serve.
        """
        folder = Path(hf_dir)
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not a folder ({folder.absolute()}); give a local checkpoint folder with a tokenizer"
            )
        try:
            tokenizer = _tokenizer_class(folder).from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        try:
            return cls(
                tokenizer,
                stop_ids=_stop_ids_of(folder),
                default_template_kwargs=default_template_kwargs,
                now=now,
            )
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error

    def encode_root(self, messages: Sequence[Message], conversation: Conversation) -> TurnDelta:
        """The ids of a conversation from its start, without and with generation prompt.

        Assistant messages in it are history that was not sampled here. TransitionRefused, with `field` naming the
        message, where the template refuses.
        """
        if not messages:
            raise TransitionRefused("a conversation needs at least one message", field="messages")
        frame = self._frame(conversation)
        return encode_late_system(messages, 1, lambda given: encode_root(frame, given))

    def encode_delta(self, tail: SampledTail, messages: Sequence[Message], conversation: Conversation) -> TurnDelta:
        """The ids between a sampled turn and the next one.

        `messages` are all that came since that turn, in order; none of them opens a new assistant turn behind it. The
        delta is a function of all of them, because templates group tool results. A step that the template writes
        differently in other histories comes from a render of the whole history. TransitionRefused where the template
        refuses the step, or the history does not stay as it is; `field` is relative to `messages`.
        """
        frame = self._frame(conversation)

        def encode(given: Sequence[Message]) -> TurnDelta:
            try:
                return deltas.encode_delta(frame, self.ends, tail, given)
            except TransitionRefused as refused:
                if tail.past is None:
                    raise
                return encode_whole(frame, self.ends, tail, tail.past(), given, refused)

        return encode_late_system(messages, 0, encode)

    def shows_images(self, role: Role, conversation: Conversation) -> bool:
        """Whether the template has a place for images in messages of this role.

        Where it has none, the ids contain the plain text `<image>` instead.
        """
        return self._frame(conversation).image_part(role) is not None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included, nothing cleaned up. Short tuples (openings) are remembered."""
        if not isinstance(ids, tuple) or len(ids) > _MOST_REMEMBERED:
            return self._text.full.decode(list(ids), skip_special_tokens=False)
        text = self._short.get(ids)
        if text is None:
            text = self._text.full.decode(list(ids), skip_special_tokens=False)
            self._short.put(ids, text)
        return text

    def encode_sampled(self, text: str) -> list[int]:
        """Ids for a text as a model would sample it: control tokens count, no bos, not the start of a sequence."""
        return self._text.encode(text)

    def end_of_turn_id(self) -> int:
        """The stop id that the template writes after an assistant turn (its smallest stop id where it writes none)."""
        assert self.ends.end_id is not None
        return self.ends.end_id

    def check(self) -> CodecReport:
        """Prove the tokenizer and try each kind of step once: what `silva check` prints before a run."""
        plain = self._frame(Conversation(template_kwargs={}))
        called = self._frame(Conversation(tools=(_PROBE_TOOL,), template_kwargs={}))
        return check_codec(self._text, plain, called, self.ends)

    def _frame(self, conversation: Conversation) -> Frame:
        kwargs = {**self._default_kwargs, **conversation.template_kwargs}
        try:
            key = msgspec.json.encode((conversation.tools, kwargs))
        except (RecursionError, TypeError, ValueError) as error:
            raise TransitionRefused(f"tools or template arguments are not JSON: {error}", field="tools") from error
        frame = self._frames.get(key)
        if frame is None:
            if conversation.template_kwargs:
                self._prove_kwargs(kwargs)
            frame = self._make_frame(conversation.tools, kwargs)
            self._frames.put(key, frame)
        return frame

    def _make_frame(self, tools: Sequence[JsonObject], kwargs: JsonObject) -> Frame:
        return Frame(self._template, self._text, self._words, tools, kwargs)

    def _prove_kwargs(self, kwargs: JsonObject) -> None:
        """Raise TransitionRefused, naming the key, where a set of template arguments breaks even a simple turn."""
        key = msgspec.json.encode(kwargs)
        if self._proven_kwargs.get(key) or not self._works(self._default_kwargs):
            return
        if not self._works(kwargs):
            changed = [k for k, v in kwargs.items() if k not in self._default_kwargs or v != self._default_kwargs[k]]
            guilty = [name for name in changed if self._works({k: v for k, v in kwargs.items() if k != name})]
            name = (guilty or changed)[0]
            raise TransitionRefused(
                f"the chat template argument {name!r} (value {kwargs[name]!r}) makes the template fail, or write turns "
                "that cannot be continued token by token; leave it out or correct it",
                field=f"chat_template_kwargs.{name}",
            )
        self._proven_kwargs.put(key, True)

    def _works(self, kwargs: JsonObject) -> bool:
        user = Message(role="user", content="hi")
        try:
            frame = self._make_frame((), kwargs)
            encode_root(frame, [user])
            answer = SampledTail(message=Message(role="assistant", content="yes"), last_id=-1, cut=True)
            deltas.encode_delta(frame, self.ends, answer, [user])
        except TransitionRefused:
            return False
        return True


def _tokenizer_class(folder: Path) -> Any:
    """What loads the tokenizer: AutoTokenizer, or the generic class where the folder names it.

    The two give the same tokenizer then, but AutoTokenizer imports torch where it is installed, which costs a second.
    """
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = None
    named = cast("dict[str, object]", settings).get("tokenizer_class") if isinstance(settings, dict) else None
    if named in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _stop_ids_of(folder: Path) -> list[int]:
    """The eos ids that generation_config.json and config.json name."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config: object = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} is not a JSON object")
        inner = cast("JsonObject", config).get("text_config")
        nested = cast("JsonObject", inner).get("eos_token_id") if isinstance(inner, dict) else None
        for value in (cast("JsonObject", config).get("eos_token_id"), nested):
            found.extend(
                i for i in (cast("list[object]", value) if isinstance(value, list) else [value]) if type(i) is int
            )
    return found
