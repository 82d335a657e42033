"""How each chat template of the oracles is served: without the history, from a render of the whole one, or not at all.

    PYTHONPATH=src python bench/templates.py [NAME ...]

Takes every template that scripts/install_test_oracles.sh fetched (the training variants and equal copies aside) on a
small vocabulary, with control tokens guessed from the template's text, and prints one line a template with what the
start check says of four steps. Exit 1 where a name is unknown.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from oracles import NOW, ROOT, small_bpe
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from silva.codec import TurnCodec
from silva.types.errors import ConfigError

STEPS = (("text", "user"), ("call", "tool"), ("2 calls", "tool, tool"), ("call", "tool, user"))
_TOKEN = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s'\"{}]+｜>|\[/?[A-Z_]{2,}\]|</?(?:think|tool_call|tool_response|s|bos|eos)>"
    r"|<(?:start|end|begin)_of_[a-z]+>|<\|[a-z_]+>|<[a-z_]+\|>|\[e~\[|\]~[!b]\[|\]~b\]|<seed:[a-z_:]+>|<SPECIAL_\d+>"
    r"|<sep>|</?(?:assistant|user|system)>"
)
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "[e~["),
    *("<|assistant_end|>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "[EOS]"),
    *("<seed:eos>", "<end_of_sentence>", "<SPECIAL_12>", "<sep>", "</assistant>"),
)
_STOPS = ("<|call|>", "<|calls|>", "<|tools_suffix|>", "<|eom_id|>", "<|tool_response>")
"""Tokens behind which a sampler hands a call over, where a template has them."""


def codec_of(source: str) -> TurnCodec:
    found = list(dict.fromkeys(_TOKEN.findall(source)))
    end = next((token for token in _ENDS if token in found), "</s>")
    backend = small_bpe()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in dict.fromkeys((*found, end, "<s>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end)
    tokenizer.chat_template = source
    stops = [tokenizer.convert_tokens_to_ids(token) for token in _STOPS if token in found]
    return TurnCodec(tokenizer, stop_ids=stops, now=NOW)


def served(source: str) -> dict[tuple[str, str], str]:
    try:
        report = codec_of(source).check()
    except ConfigError as error:
        return dict.fromkeys(STEPS, f"no codec: {error}")
    return {step: report.status(*step) for step in STEPS}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    paths = [p for p in sorted(ROOT.glob("t*/*.jinja")) if not p.stem.endswith("_training")]
    unknown = set(names) - {path.stem for path in paths}
    if unknown or not paths:
        print(f"no such template under {ROOT}: {', '.join(sorted(unknown)) or 'none at all'}", file=sys.stderr)
        return 1
    totals: dict[tuple[str, str], Counter[str]] = {step: Counter() for step in STEPS}
    seen: set[str] = set()
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if source in seen or (names and path.stem not in names):
            continue
        seen.add(source)
        cells = served(source)
        for step, status in cells.items():
            totals[step][status.split(":")[0]] += 1
        print(f"{path.stem:55}", *(f"{status[:60]:10}" for status in cells.values()), flush=True)
    print(f"{len(seen)} templates")
    for step, counts in totals.items():
        print(f"{' -> '.join(step):22}", ", ".join(f"{num} {status}" for status, num in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
