"""Speed and memory of one session's forest.

    PYTHONPATH=src python bench/state_forest.py

Prints the median time of match + commit at turn 1000 (message digests known, as the serving side caches them), and the
bytes that a turn holds when the context has grown to 16k tokens with 512 new tokens a turn (tracemalloc).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc

from silva.forest.identity import message_digest
from silva.forest.placement import Placement, Response
from silva.forest.session_forest import SessionForest
from silva.types.generation import GenerateResult, VersionSpan
from silva.types.messages import Conversation, Message

CONVERSATION = Conversation(template_kwargs={})


def _turn(
    forest: SessionForest, messages: list[Message], digests: list[bytes], num_prompt: int, num_sampled: int, seed: int
) -> float:
    """One user message and its answer. Returns the seconds of match and commit together."""
    draw = random.Random(seed)
    asked = Message(role="user", content=_text(draw, num_prompt))
    messages.append(asked)
    digests.append(message_digest(asked))
    result = GenerateResult(
        ids=[draw.randrange(1000, 150_000) for _ in range(num_sampled)],
        logprobs=[-draw.random() for _ in range(num_sampled)],
        kept_mass=[1.0] * num_sampled,
        finish_reason="stop",
        version_spans=(VersionSpan(start=0, length=num_sampled, version=seed // 8),),
    )
    answer = Message(role="assistant", content=_text(draw, num_sampled))
    response = Response(result=result, message=answer, digest=message_digest(answer), request_id=f"r{seed}")
    observation = tuple(draw.randrange(1000, 150_000) for _ in range(num_prompt))

    started = time.perf_counter()
    match = forest.match(CONVERSATION, digests)
    placement = Placement(
        match=match, messages=tuple(messages[match.num_matched :]), observation_ids=observation, lead_ids=(1, 2, 3)
    )
    forest.commit(placement, response)
    seconds = time.perf_counter() - started

    messages.append(answer)
    digests.append(response.digest)
    return seconds


def _text(draw: random.Random, num_tokens: int) -> str:
    """About four letters a token."""
    return "".join(draw.choices("abcdefgh ", k=4 * num_tokens))


def measure_speed(num_turns: int, window: int) -> tuple[float, float]:
    """Median and worst milliseconds of match + commit over the last `window` turns."""
    forest, messages, digests = SessionForest(), list[Message](), list[bytes]()
    times = [_turn(forest, messages, digests, 16, 48, seed) for seed in range(num_turns)]
    return statistics.median(times[-window:]) * 1e3, max(times[-window:]) * 1e3


def measure_memory(num_context: int, num_new: int, num_sampled: int) -> float:
    """Bytes a turn once the context holds `num_context` tokens; text, ids and log-probs of the turn are all kept."""
    forest, messages, digests = SessionForest(), list[Message](), list[bytes]()
    num_turns = num_context // num_new
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for seed in range(num_turns):
        _turn(forest, messages, digests, num_new - num_sampled, num_sampled, seed)
    messages.clear()
    digests.clear()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(forest.nodes) == 2 * num_turns + 1
    return held / num_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=1000, help="turns of the speed run")
    options = parser.parse_args()
    median_ms, worst_ms = measure_speed(options.turns, min(100, options.turns))
    print(f"match + commit at turn {options.turns}: median {median_ms:.3f} ms, worst of the last 100 {worst_ms:.3f} ms")
    for sampled in (64, 256, 512):
        held = measure_memory(16_384, 512, sampled)
        print(f"held a turn at 16384 tokens, 512 new of which {sampled} sampled: {held / 1024:.1f} KiB")


if __name__ == "__main__":
    main()
