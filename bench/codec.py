"""Cost of the turn codec against a full render and encode, in one run.

    PYTHONPATH=src python bench/codec.py [--tokenizer DIR] [--turns 200] [--whole bielik]

Without --tokenizer the Qwen2.5 template on its vocabulary is used (scripts/install_test_oracles.sh first). Prints CPU
milliseconds of one delta at the last turn, of a full render and encode by transformers there, their ratio, and the CPU
seconds of preparing all prompts of the episode both ways, as one JSON line. A second line is of a template whose steps
depend on the history (bielik, command-r7b, cohere2moe or r1-distill-tools; small vocabulary): there a delta renders
all of it. Exit 1 where the ids differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from oracles import load as load_family

from silva.codec import Past, SampledTail, TurnCodec
from silva.types.messages import Conversation, Message, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs a shell command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
OUTPUT = "total 48\n-rw-r--r-- 1 root root  1203 Mar  9 08:07 README.md\ndrwxr-xr-x 4 root root 4096 src\n" * 4


def load(folder: str | None) -> TurnCodec:
    return TurnCodec.load(folder) if folder else load_family("qwen2.5").codec


def episode(turns: int) -> tuple[list[Message], list[tuple[Message, list[Message]]]]:
    steps: list[tuple[Message, list[Message]]] = []
    for n in range(turns):
        call = ToolCall(id=f"call_{n:016x}", name="run", arguments=json.dumps({"command": f"ls -la /srv/{n}"}))
        result = Message(role="tool", content=f"{OUTPUT}{n}\n", tool_call_id=call.id)
        steps.append((Message(role="assistant", content=f"Step {n}: look.", tool_calls=(call,)), [result]))
    return [Message(role="system", content="You are careful."), Message(role="user", content="Find it.")], steps


def to_hf(message: Message) -> dict[str, Any]:
    chat = message.to_chat()
    chat["content"] = message.content
    for call in chat.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return chat


def cpu_ms(work: Any, repeats: int) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(1000 * (time.process_time() - start))
    return times


def whole_delta(family: str, turns: int) -> dict[str, Any] | None:
    """Cost of a delta at the last turns where all before it is rendered. None where the ids differ."""
    codec = load_family(family).codec
    conversation = Conversation(tools=(TOOL,), template_kwargs={})
    root, steps = episode(turns)
    asked: list[Past] = []

    def delta(num: int) -> list[int]:
        """Behind the first `num` turns."""
        before = [*root, *(m for answer, new in steps[:num] for m in (answer, *new))]

        def past() -> Past:
            asked.append(Past(messages=tuple(before), num_given=len(root)))
            return asked[-1]

        answer, new = steps[num]
        tail = SampledTail(message=answer, last_id=-1, cut=True, has_system=True, past=past)
        made = codec.encode_delta(tail, new, conversation)
        return made.observation_ids + made.opening_ids

    ids = delta(turns - 1)
    chat = [to_hf(message) for message in (*root, *(m for answer, new in steps for m in (answer, *new)))]

    def full() -> list[int]:
        text: Any = codec.tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        return codec.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    if not asked or full()[-len(ids) :] != ids:
        return None
    nums = iter(range(turns - 6, turns - 1))
    one = cpu_ms(lambda: delta(next(nums)), 5)
    return {
        "template": family,
        "turns": turns,
        "whole_delta_ms": round(statistics.median(one), 1),
        "known_shape_ms": round(statistics.median(cpu_ms(lambda: delta(turns - 1), 5)), 1),
        "full_render_and_encode_ms": round(statistics.median(cpu_ms(full, 3)), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--whole", default="bielik")
    args = parser.parse_args()
    codec = load(args.tokenizer)
    conversation = Conversation(tools=(TOOL,), template_kwargs={})
    root, steps = episode(args.turns)
    end = codec.end_of_turn_id()

    def full(num_turns: int) -> list[int]:
        messages = [*root, *(m for answer, new in steps[:num_turns] for m in (answer, *new))]
        chat = [to_hf(message) for message in messages]
        text: Any = codec.tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        return codec.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def delta(turn: int) -> list[int]:
        answer, new = steps[turn]
        tail = SampledTail(message=answer, last_id=end, cut=False, has_system=True)
        made = codec.encode_delta(tail, new, conversation)
        return made.observation_ids + made.opening_ids

    start = time.process_time()
    first = codec.encode_root(root, conversation)
    deltas = [delta(turn) for turn in range(args.turns)]
    ours_s = time.process_time() - start
    whole = full(args.turns)
    if whole[-len(deltas[-1]) :] != deltas[-1] or full(0) != first.observation_ids + first.opening_ids:
        print("the ids differ from the full render", file=sys.stderr)
        return 1
    sampled = max(1, args.turns // 20)
    start = time.process_time()
    for turn in range(0, args.turns, sampled):
        full(turn + 1)
    full_s = (time.process_time() - start) * sampled
    one = cpu_ms(lambda: delta(args.turns - 1), 300)
    everything = cpu_ms(lambda: full(args.turns), 5)
    history = [*root, *(m for answer, new in steps for m in (answer, *new))]
    imported = cpu_ms(lambda: codec.encode_root(history, conversation), 3)
    ratio = statistics.median(everything) / statistics.median(one)
    row = {
        "turns": args.turns,
        "ids_at_last_turn": len(whole),
        "delta_ms": round(statistics.median(one), 3),
        "delta_p99_ms": round(sorted(one)[int(0.99 * len(one))], 3),
        "full_render_and_encode_ms": round(statistics.median(everything), 1),
        "ratio": round(ratio),
        "episode_cpu_s": round(ours_s, 3),
        "episode_by_full_renders_cpu_s": round(full_s, 2),
        "import_as_root_ms": round(statistics.median(imported), 1),
    }
    print(json.dumps(row))
    whole_row = whole_delta(args.whole, args.turns)
    if whole_row is None:
        print("the ids of the whole render differ, or it was not asked for", file=sys.stderr)
        return 1
    print(json.dumps(whole_row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
