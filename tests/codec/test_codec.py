"""The codec's own promises, on a small tokenizer and templates written for the purpose."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_templates import TURNS, tiny_codec, tiny_folder, tiny_tokenizer

from silva.codec import SampledTail, TurnCodec
from silva.codec.encoder import TokenText
from silva.codec.late_system import LATE_SYSTEM_MARK
from silva.types.errors import ConfigError, TransitionRefused
from silva.types.messages import Conversation, Message, ToolCall

PLAIN = Conversation(template_kwargs={})
ANSWER = Message(role="assistant", content="yes")


def user(content: str = "hi") -> Message:
    return Message(role="user", content=content)


def tool(properties: dict[str, Any] | None = None, **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": "look", "parameters": parameters, **function}}


def root_text(codec: TurnCodec, messages: list[Message], conversation: Conversation = PLAIN) -> str:
    delta = codec.encode_root(messages, conversation)
    return codec.decode(delta.observation_ids + delta.opening_ids)


def delta_text(codec: TurnCodec, messages: list[Message], tail: Message = ANSWER, **options: Any) -> str:
    cut = SampledTail(message=tail, last_id=-1, cut=True)
    delta = codec.encode_delta(cut, messages, options.get("conversation", PLAIN))
    return codec.decode(delta.observation_ids + delta.opening_ids)


@pytest.fixture(scope="module")
def codec() -> TurnCodec:
    return tiny_codec()


def control_ids(codec: TurnCodec, ids: list[int]) -> list[int]:
    return [i for i in ids if i in codec.tokenizer.added_tokens_decoder]


class TestLoad:
    def test_stop_ids_come_from_the_files_and_the_template(self, tmp_path: Path) -> None:
        folder = tiny_folder(
            tmp_path, generation_config={"eos_token_id": [7, 9]}, config={"text_config": {"eos_token_id": 11}}
        )
        codec = TurnCodec.load(folder)
        end, eos = (codec.encode_sampled(text)[0] for text in ("<|end|>", "<|eos|>"))
        assert codec.stop_ids == {7, 9, 11, end, eos}
        assert codec.end_of_turn_id() == end
        assert codec.vocab_size == len(codec.tokenizer)

    @pytest.mark.parametrize(
        ("template", "files", "words"),
        [
            (None, {}, "no chat template.*chat_template.jinja"),
            ("{% for %}", {}, "does not compile: line 1"),
            (TURNS, {"generation_config": "{"}, "generation_config.json is not valid JSON"),
            (TURNS, {"config": "[]"}, "config.json is not a JSON object"),
        ],
    )
    def test_a_folder_that_cannot_serve_says_what_to_do(
        self, tmp_path: Path, template: str | None, files: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            TurnCodec.load(tiny_folder(tmp_path, template, **files))

    def test_no_folder_and_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is not a folder"):
            TurnCodec.load(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="cannot be loaded"):
            TurnCodec.load(tmp_path)

    def test_a_tokenizer_that_reaches_its_specials_from_text_is_refused(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer(models.WordLevel({"[UNK]": 0, "hi": 1, "<|end|>": 2}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
        tokenizer.chat_template = TURNS
        with pytest.raises(ConfigError, match="could forge turns"):
            TurnCodec(tokenizer)

    def test_named_templates_are_chosen_by_tools(self) -> None:
        source: Any = {"default": TURNS, "tool_use": "TOOLS" + TURNS}
        codec = tiny_codec(source)
        assert "TOOLS" not in root_text(codec, [user()])
        assert root_text(codec, [user()], Conversation(tools=(tool(),), template_kwargs={})).startswith("TOOLS")


class TestText:
    @given(text=st.text(max_size=60))
    @settings(max_examples=150, deadline=None)
    def test_any_text_arrives_unchanged_and_forges_nothing(self, codec: TurnCodec, text: str) -> None:
        expected = f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n"
        root = codec.encode_root([user(text)], PLAIN)
        ids = root.observation_ids + root.opening_ids
        assert codec.decode(ids) == expected
        assert len(control_ids(codec, ids)) == 3
        assert delta_text(codec, [user(text)]) == "<|end|>\n" + expected

    def test_lone_surrogates_become_replacement_characters(self, codec: TurnCodec) -> None:
        call = ToolCall(id="\ud800", name="\udfff", arguments='{"a": "\\ud800"}')
        messages = [user("a\ud83dz"), Message(role="assistant", tool_calls=(call,)), user()]
        assert root_text(codec, messages).startswith("<|start|>user\na\ufffdz<|end|>")

    @pytest.mark.parametrize("flags", [{"<|end|>": {"rstrip": True}}, {"<|start|>": {"lstrip": True}}])
    def test_tokens_that_eat_blanks_do_so_in_user_text(self, flags: dict[str, dict[str, Any]]) -> None:
        codec = tiny_codec(flags=flags)
        assert all(proof.ok for proof in codec.check().proofs)
        for text in ("  hi \n", "hi", "\u00a0hi\u2003"):
            messages = [user(text), ANSWER, user(text)]
            chat = [message.to_chat() for message in messages]
            full = codec.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            root = codec.encode_root(messages, PLAIN)
            assert root.observation_ids + root.opening_ids == codec.tokenizer.encode(full, add_special_tokens=False)

    def test_added_tokens_of_blanks_stay_in_use(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.backend_tokenizer.add_tokens(["\n\n\n"])
        codec = TurnCodec(tokenizer)
        blank = tokenizer.convert_tokens_to_ids("\n\n\n")
        assert blank in codec.encode_root([user("a\n\n\nb")], PLAIN).observation_ids

    def test_sampled_text_counts_control_tokens(self, codec: TurnCodec) -> None:
        ids = codec.encode_sampled("<think>hello</think> there<|end|>")
        assert len(control_ids(codec, ids)) == 3
        assert codec.decode(ids) == "<think>hello</think> there<|end|>"


class TestTransforms:
    def test_trimmed_and_quoted_texts_are_filled_as_the_template_would(self) -> None:
        codec = tiny_codec(TURNS.replace("(m.content or '')", "(m.content | trim | tojson)"))
        assert root_text(codec, [user('  "é" \n<&')]) == '<|start|>user\n"\\"é\\" \\n<&"<|end|>\n<|start|>assistant\n'

    def test_another_treatment_is_refused(self) -> None:
        codec = tiny_codec(TURNS.replace("(m.content or '')", "(m.content | replace('<', '&lt;'))"))
        for ask in (root_text, delta_text):
            with pytest.raises(TransitionRefused, match="neither trimming nor JSON") as caught:
                ask(codec, [user("no such letter")])
            assert caught.value.field == "messages[0]"

    def test_a_template_that_reads_the_text_is_caught_where_it_happens(self) -> None:
        codec = tiny_codec(TURNS.replace("{{- '<|end|>", "{{- '!' if 'weather' in (m.content or '') }}{{- '<|end|>"))
        assert delta_text(codec, [user("fine")]) == "<|end|>\n<|start|>user\nfine<|end|>\n<|start|>assistant\n"
        for _ in range(2):  # learned or not
            with pytest.raises(TransitionRefused, match="what their texts say") as caught:
                delta_text(codec, [user("the weather")])
            assert caught.value.field == "messages[0]"
        with pytest.raises(TransitionRefused, match="what their texts say") as caught:
            root_text(codec, [user("fine"), ANSWER, user("weather")])
        assert caught.value.status == 400


class TestRefusals:
    def test_the_template_s_own_words_and_the_message(self) -> None:
        raising = "{%- if m.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}"
        codec = tiny_codec(TURNS.replace("{{- '<|start|>' + m.role", raising + "{{- '<|start|>' + m.role", 1))
        messages = [user(), Message(role="tool", content="x", tool_call_id="c"), user()]
        with pytest.raises(TransitionRefused, match="no tools here") as caught:
            delta_text(codec, messages)
        assert caught.value.field == "messages[1]"
        with pytest.raises(TransitionRefused, match="no tools here") as caught:
            root_text(codec, messages)
        assert caught.value.field == "messages[1]"

    @pytest.mark.parametrize(
        ("late", "does"),
        [
            ("", "drops"),
            (
                "{{- '<|start|>system\\n' + (messages | selectattr('role', 'equalto', 'system') | list)"
                "[-1].content + '<|end|>\\n' }}",
                "moves",
            ),
        ],
    )
    def test_a_late_system_message_that_is_dropped_or_moved(self, late: str, does: str) -> None:
        has = "{%- if messages | selectattr('role', 'equalto', 'system') | list %}" + late + "{%- endif %}"
        codec = tiny_codec(has + TURNS.replace("in messages %}", "in messages if m.role != 'system' %}"))
        system = Message(role="system", content="be")
        with pytest.raises(TransitionRefused, match=f"{does} the system message") as caught:
            delta_text(codec, [system, user()])
        assert caught.value.field == "messages[0]"
        with pytest.raises(TransitionRefused, match=f"{does} the system message") as caught:
            root_text(codec, [user(), system, user()])
        assert caught.value.field == "messages[1]"

    @pytest.mark.parametrize("alternates", [False, True])
    def test_a_late_system_message_that_is_forbidden_becomes_a_marked_user_turn(self, alternates: bool) -> None:
        words = "{%- if m.role == 'system' and not loop.first %}{{- raise_exception('first only') }}{%- endif %}"
        if alternates:
            words += (
                "{%- if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}"
                "{{- raise_exception('take turns') }}{%- endif %}"
            )
        codec = tiny_codec(TURNS.replace("{{- '<|start|>' + m.role", words + "{{- '<|start|>' + m.role", 1))
        system, marked = Message(role="system", content="be"), user(LATE_SYSTEM_MARK + "be")
        cell = next(c for c in codec.check().cells if (c.assistant, c.tail) == ("text", "system, user"))
        assert cell.status == "refused" and ("user turn" in cell.reason) != alternates
        for ask, before in ((delta_text, []), (delta_text, [user()]), (root_text, [system, user()])):
            if alternates and before:
                with pytest.raises(TransitionRefused, match="first only") as caught:
                    ask(codec, [*before, system])
                assert caught.value.field == f"messages[{len(before)}]"
            else:
                assert ask(codec, [*before, system]) == ask(codec, [*before, marked])
        if not alternates:
            long = [user(), ANSWER] * 40
            assert root_text(codec, [*long, system]) == root_text(codec, [*long, marked])

    def test_a_turn_that_depends_on_history_is_impure(self) -> None:
        codec = tiny_codec(TURNS.replace("+ m.role +", "+ m.role ~ loop.index +"))
        with pytest.raises(TransitionRefused, match="other histories"):
            delta_text(codec, [user()])
        assert codec.check().status("text", "user") == "whole"

    def test_knowing_that_no_system_message_leads_allows_more(self) -> None:
        moved = "{%- if m.role == 'user' and loop.last and messages[0].role == 'system' %}{{- 'SYS' }}{%- endif %}"
        codec = tiny_codec(TURNS.replace("{{- '<|end|>", moved + "{{- '<|end|>"))
        for has_system, allowed in ((None, False), (True, True), (False, True)):
            tail = SampledTail(message=ANSWER, last_id=-1, cut=True, has_system=has_system)
            if allowed:
                ids = codec.encode_delta(tail, [user()], PLAIN).observation_ids
                assert ("SYS" in codec.decode(ids)) == has_system
            else:
                with pytest.raises(TransitionRefused, match="other histories"):
                    codec.encode_delta(tail, [user()], PLAIN)

    def test_no_token_closes_a_turn(self) -> None:
        codec = tiny_codec("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        assert root_text(codec, [user()]) == "user: hi\n"
        with pytest.raises(TransitionRefused, match="where its turn ends"):
            delta_text(codec, [user()])
        assert not codec.check().ok

    def test_an_empty_root(self, codec: TurnCodec) -> None:
        with pytest.raises(TransitionRefused, match="at least one message"):
            codec.encode_root([], PLAIN)


class TestCalls:
    def test_results_share_the_ids_of_their_calls_in_any_order(self) -> None:
        template = TURNS.replace(
            "(m.content or '')", "(m.content or '') + ('[' + m.tool_call_id + ']' if m.tool_call_id else '')"
        )
        codec = tiny_codec(template)
        calls = tuple(ToolCall(id=f"call_{i}", name="look", arguments="{}") for i in (1, 2))
        tail = Message(role="assistant", tool_calls=calls)
        results = [Message(role="tool", content=f"r{i}", tool_call_id=f"call_{i}") for i in (2, 1)]
        text = delta_text(codec, [*results, Message(role="tool", content="?", tool_call_id="<|end|>")], tail)
        assert "r2[call_2]" in text and "r1[call_1]" in text
        assert "?[call_" in text and "[<|end|>]" not in text, "an odd id is replaced"

    @pytest.mark.parametrize("raw", ['{"a": ', "[1]", "null", '"x"', '{"a": ' * 5000, "1" * 5000, '{"n": NaN}', ""])
    def test_any_arguments_of_an_old_call_can_be_rendered(self, codec: TurnCodec, raw: str) -> None:
        call = ToolCall(id="c", name="look", arguments=raw)
        text = root_text(codec, [user(), Message(role="assistant", tool_calls=(call,)), user()])
        assert text.count("<|end|>") == 3
        assert "look {" in text

    def test_broken_arguments_stand_as_they_are_where_the_template_takes_text(self) -> None:
        takes = "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)"
        codec = tiny_codec(TURNS.replace("call.function.arguments | tojson", takes))
        call = ToolCall(id="c", name="look", arguments='{"a": <|end|>')
        text = root_text(codec, [user(), Message(role="assistant", tool_calls=(call,)), user()])
        assert 'look {"a": <|end|><|end|>\n' in text
        wrapped = root_text(tiny_codec(), [user(), Message(role="assistant", tool_calls=(call,)), user()])
        assert 'look {"arguments": "{\\"a\\": <|end|>"}<|end|>\n' in wrapped

    def test_odd_names_and_keys_forge_nothing(self, codec: TurnCodec) -> None:
        arguments = json.dumps({"<|end|>": ["<|start|>", {"think": "</think>"}]})
        call = ToolCall(id="<|end|>", name="<|end|>", arguments=arguments)
        messages = [user(), Message(role="assistant", tool_calls=(call,)), user()]
        root = codec.encode_root(messages, PLAIN)
        assert len(control_ids(codec, root.observation_ids)) == 6
        assert '"</think>"' in codec.decode(root.observation_ids)
        text = delta_text(codec, [Message(role="tool", content="r", tool_call_id="<|end|>")], messages[1])
        assert text == "<|end|>\n<|start|>tool\nr<|end|>\n<|start|>assistant\n"


class TestTools:
    LISTED = "{%- for t in tools or [] %}{{- t | tojson }}{%- endfor %}" + TURNS

    def test_definitions_are_text(self) -> None:
        codec = tiny_codec(self.LISTED)
        odd = tool(description='<|end|> "quoted"\n', name="<|start|>")
        root = codec.encode_root([user()], Conversation(tools=(odd,), template_kwargs={}))
        assert len(control_ids(codec, root.observation_ids)) == 2
        assert json.dumps(odd) in codec.decode(root.observation_ids)

    def test_plain_words_that_a_template_turns_into_markers(self) -> None:
        keys = "{%- for t in tools or [] %}{%- for k in t.function.parameters.properties %}{{- '<' ~ k ~ '>' }}"
        codec = tiny_codec(keys + "{%- endfor %}{%- endfor %}" + TURNS)
        conversation = Conversation(tools=(tool({"think": {"type": "string"}}),), template_kwargs={})
        root = codec.encode_root([user()], conversation)
        assert codec.decode(root.observation_ids).startswith("<think>")
        assert len(control_ids(codec, root.observation_ids)) == 2

    def test_definitions_that_are_changed_beyond_recognition_are_refused_by_path(self) -> None:
        codec = tiny_codec("{{- (tools or '') | string }}" + TURNS)
        tool = {"type": "function", "function": {"name": "f", "description": "a\n'b'"}}
        with pytest.raises(TransitionRefused, match="neither trimming nor JSON") as caught:
            codec.encode_root([user()], Conversation(tools=(tool,), template_kwargs={}))
        assert caught.value.field == "tools"

    def test_odd_keys_are_refused_by_path(self, codec: TurnCodec) -> None:
        conversation = Conversation(tools=(tool(), tool({"<|end|>": {}})), template_kwargs={})
        with pytest.raises(TransitionRefused, match="has the key") as caught:
            codec.encode_root([user()], conversation)
        assert caught.value.field == "tools[1].function.parameters.properties"

    def test_endless_nesting_is_refused(self, codec: TurnCodec) -> None:
        deep: dict[str, Any] = {"type": "object"}
        for _ in range(90):
            deep = {"type": "object", "properties": {"a": deep}}
        for levels in (1, 30):
            for _ in range(levels * 1000):
                deep = {"items": deep}
            with pytest.raises(TransitionRefused, match=r"nested deeper|are not JSON|too deeply"):
                codec.encode_root([user()], Conversation(tools=(tool(parameters=deep),), template_kwargs={}))


class TestTemplateArguments:
    THINKING = TURNS.replace(
        "{{- '<|start|>assistant\\n' }}",
        "{{- '<|start|>assistant\\n' }}{%- if think is defined %}{{- '<think>' + think }}{%- endif %}",
    )

    def test_they_change_the_opening_and_override_the_defaults(self) -> None:
        codec = tiny_codec(self.THINKING, default_template_kwargs={"think": "hard"})
        opening = codec.encode_root([user()], PLAIN).opening_ids
        assert codec.decode(opening) == "<|start|>assistant\n<think>hard"
        opening = codec.encode_root([user()], Conversation(template_kwargs={"think": "</think>"})).opening_ids
        assert codec.decode(opening) == "<|start|>assistant\n<think></think>"
        assert len(control_ids(codec, opening)) == 2, "a request's argument is text"

    @pytest.mark.parametrize(
        "kwargs", [{"think": 3}, {"other": "x", "think": None}, {"fine": {"a b": [1]}, "think": []}]
    )
    def test_a_set_that_breaks_the_template_names_the_key(self, kwargs: dict[str, Any]) -> None:
        codec = tiny_codec(self.THINKING)
        with pytest.raises(TransitionRefused, match="'think'") as caught:
            codec.encode_root([user()], Conversation(template_kwargs=kwargs))
        assert caught.value.field == "chat_template_kwargs.think"

    def test_reserved_names_cannot_be_taken_over(self) -> None:
        codec = tiny_codec(self.THINKING)
        kwargs = {"messages": [], "add_generation_prompt": False}
        assert root_text(codec, [user()], Conversation(template_kwargs=kwargs)) == root_text(codec, [user()])

    def test_the_date_stands_still(self) -> None:
        codec = tiny_codec("{{- strftime_now('%Y-%m-%d %H:%M') }}" + TURNS)
        assert root_text(codec, [user()]).startswith("2025-03-09 08:07<|start|>user")


class TestSharing:
    def test_many_threads_get_what_one_gets(self) -> None:
        def work(codec: TurnCodec, out: list[str]) -> None:
            for n in range(12):
                call = ToolCall(id="c", name=f"look{n % 3}", arguments='{"a": "b"}')
                tail = Message(role="assistant", tool_calls=(call,) * (n % 2), content="x" * (n % 3))
                out.append(delta_text(codec, [user(f"{n}")] * (1 + n % 4), tail))
                out.append(root_text(codec, [user(f"{n}"), tail, user()]))

        expected: list[str] = []
        work(tiny_codec(), expected)
        shared, outs = tiny_codec(), [[] for _ in range(6)]
        threads = [threading.Thread(target=work, args=(shared, out)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(out == expected for out in outs)

    def test_caches_are_bounded(self) -> None:
        codec = tiny_codec()
        frame = codec._frame(PLAIN)
        for n in range(700):
            codec.encode_root([user(" " * (n + 1))], PLAIN)
            codec._frame(Conversation(template_kwargs={"n": n % 90}))
        assert len(frame.roots) == 256
        assert len(codec._frames) == 64


class TestCloses:
    """Templates that close parts of an assistant turn before they close the turn."""

    PARTS = TURNS.replace(
        "{{- '<|end|>\\n' }}", "{{- '</think>part\\n<think><|end|>\\n' if m.role == 'assistant' else '<|end|>' }}"
    )
    NEXT = "<|start|>user\nhi<|end|><|start|>assistant\n"

    @pytest.mark.parametrize(
        ("last", "text"),
        [
            ("cut", "</think>part\n<think><|end|>\n" + NEXT),
            ("<|end|>", "\n" + NEXT),
            ("<|eos|>", "\n" + NEXT),
            ("</think>", "part\n<think><|end|>\n" + NEXT),
        ],
    )
    @pytest.mark.parametrize("within", [False, True])
    def test_all_that_was_sampled_of_a_close_is_left_out(self, within: bool, last: str, text: str) -> None:
        """`within`: the same token stands inside a turn, too, so that it ends none."""
        thought = "{%- if m.reasoning_content %}{{- m.reasoning_content + '</think>' }}{%- endif %}" if within else ""
        codec = tiny_codec(
            self.PARTS.replace(
                "{{- '<|start|>' + m.role + '\\n' + ", "{{- '<|start|>' + m.role + '\\n' }}" + thought + "{{- "
            )
        )
        end, part = codec.encode_sampled("<|end|></think>")
        codec = TurnCodec(codec.tokenizer, stop_ids=[end])
        assert part in codec.ends.closers and (part in codec.stop_ids) != within
        tail = SampledTail(message=ANSWER, last_id=codec.encode_sampled(last)[0], cut=last == "cut", has_system=False)
        delta = codec.encode_delta(tail, [user()], PLAIN)
        assert codec.decode(delta.observation_ids + delta.opening_ids) == text


class TestOpeners:
    """Templates in which nothing closes an assistant turn but the marker of the next role."""

    TEMPLATE = (
        "{%- set mark = {'user': '<think>', 'tool': '</think>', 'assistant': '<|start|>', 'system': '<|end|>'} %}"
        "{%- for m in messages %}{{- mark[m.role] + '\\n' + (m.content or '') }}"
        "{%- for call in m.tool_calls or [] %}{{- call.function.arguments | tojson }}{%- endfor %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>' }}{%- endif %}"
    )
    CALL = Message(role="assistant", tool_calls=(ToolCall(id="c", name="look", arguments="{}"),))
    RESULT = Message(role="tool", content="r", tool_call_id="c")

    def ask(self, tail: Message, stop: str, messages: list[Message]) -> tuple[str, bool]:
        codec = tiny_codec(self.TEMPLATE)
        sampled = SampledTail(message=tail, last_id=codec.encode_sampled(stop)[0], cut=stop == "cut")
        delta = codec.encode_delta(sampled, messages, PLAIN)
        return codec.decode(delta.observation_ids + delta.opening_ids), delta.marker_mismatch

    def test_the_role_markers_stop(self) -> None:
        codec = tiny_codec(self.TEMPLATE)
        marks = {codec.encode_sampled(text)[0] for text in ("<think>", "</think>", "<|eos|>")}
        assert codec.ends.opener and codec.stop_ids == marks
        assert codec.decode([codec.end_of_turn_id()]) == "<think>"

    def test_equal_markers_are_written_once(self) -> None:
        assert self.ask(ANSWER, "<think>", [user()]) == ("\nhi<|start|>", False)
        assert self.ask(self.CALL, "</think>", [self.RESULT]) == ("\nr<|start|>", False)

    def test_another_marker_stays_and_is_counted(self) -> None:
        assert self.ask(ANSWER, "</think>", [user()]) == ("<think>\nhi<|start|>", True)
        assert self.ask(self.CALL, "<think>", [self.RESULT]) == ("</think>\nr<|start|>", True)
        assert self.ask(ANSWER, "<think>", []) == ("<|start|>", True)

    def test_cut_turns_and_other_stops_are_no_mismatch(self) -> None:
        assert self.ask(ANSWER, "cut", [user()]) == ("<think>\nhi<|start|>", False)
        assert self.ask(ANSWER, "<|eos|>", [user()]) == ("<think>\nhi<|start|>", False)
        assert self.ask(ANSWER, "cut", [Message(role="system", content="s"), user()])[0].startswith("<|end|>\ns<think>")


def test_the_generic_tokenizer_class_is_what_auto_tokenizer_would_take(chatml_dir):
    from transformers import AutoTokenizer

    ours, auto = TurnCodec.load(chatml_dir).tokenizer, AutoTokenizer.from_pretrained(chatml_dir)
    assert ours.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()
    assert (ours.chat_template, ours.special_tokens_map) == (auto.chat_template, auto.special_tokens_map)


class TestBatches:
    @pytest.mark.slow
    def test_a_text_has_the_same_ids_in_a_batch_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = tiny_tokenizer().backend_tokenizer
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        alone = TokenText(backend)
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
        batched = TokenText(backend)

        @given(st.text(min_size=1))
        @settings(max_examples=50)
        def check(text: str) -> None:
            assert batched.encode_plain(text) == alone.encode_plain(text)
            assert batched.encode(f"<|end|>{text}") == alone.encode(f"<|end|>{text}")

        check()
