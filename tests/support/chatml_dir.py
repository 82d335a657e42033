"""Builds a small tokenizer folder with a ChatML-shaped chat template: enough for a scripted engine, no weights."""

from __future__ import annotations

import json
from pathlib import Path

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_LEARNED = "hello world the weather in Paris is sunny and the answer to the question is yes no wait next turn " * 20

_HEAD = """\
{%- macro block(role, text) -%}{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}{%- endmacro -%}
{%- set first_system = messages[0].role == 'system' -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if first_system -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
  {{- 'You can call:' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- elif first_system -%}
  {{- block('system', messages[0].content) -}}
{%- endif -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
"""
_ASSISTANT = """\
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if m.reasoning_content and REASONING_KEPT -%}
      {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
      {%- if m.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {%- if call.function.arguments is string -%}{{- call.function.arguments -}}
      {%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
"""
_TAIL = """\
  {%- elif m.role == 'tool' -%}
    {%- if loop.first -%}{{- raise_exception('a tool result needs a call before it') -}}{%- endif -%}
    {%- if messages[loop.index0 - 1].role == 'user' -%}
      {{- raise_exception('a tool result needs a call before it') -}}
    {%- endif -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif not (m.role == 'system' and loop.first) -%}
    {{- block(m.role, m.content) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'OPENING' -}}{%- endif -%}
"""


def chat_template(*, prefill_think: bool = False, drops_old_reasoning: bool = False) -> str:
    """`prefill_think` opens each answer inside a thought, `drops_old_reasoning` forgets earlier thoughts."""
    kept = "loop.index0 > ns.last_user" if drops_old_reasoning else "true"
    opening = "<|im_start|>assistant\\n" + ("<think>\\n" if prefill_think else "")
    return _HEAD + _ASSISTANT.replace("REASONING_KEPT", kept) + _TAIL.replace("OPENING", opening)


def build_chatml_dir(
    folder: Path, *, prefill_think: bool = False, drops_old_reasoning: bool = False, context_len: int = 32768
) -> Path:
    """Write tokenizer files into `folder`. Stop ids are those of `<|im_end|>` and `<|endoftext|>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([_LEARNED], trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context_len,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template(prefill_think=prefill_think, drops_old_reasoning=drops_old_reasoning)
    tokenizer.save_pretrained(folder)
    stop_ids = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return folder
