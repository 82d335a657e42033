"""The shopkeeper's world: items, prices, ways to ask, and written-out dialogues to learn from.

Everything random comes from the `random.Random` that the caller passes in. No torch, no transformers.
"""

from __future__ import annotations

import json
import random
from typing import Any

_ITEM_WORDS = """
apple apricot banana bean bread butter cabbage carrot cheese cherry coffee cream egg fig flour garlic grape honey leek
lemon lime mango melon milk olive onion orange peach pear pepper plum potato rice salt sugar tea tomato
"""
ITEMS = tuple(_ITEM_WORDS.split())

PRICES = range(1, 10)

TRAIN_PHRASINGS = (
    "price of {}?",
    "the price of {}?",
    "what is the price of {}?",
    "how much is the {}?",
    "how much for {}?",
    "what does {} cost?",
    "cost of {} today?",
    "tell me the price for {}",
    "{} price today?",
    "how much does the {} cost?",
    "{}: what is the cost?",
    "what is {} today?",
)

EVAL_PHRASINGS = (
    "how much is {} today?",
    "what is the cost of {}?",
    "what is the {} price?",
    "what does the {} cost today?",
    "{} cost?",
    "the price for {} today?",
)

LOOKUP_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Today's price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}

NO_SUCH_ITEM = "no such item"
GIVE_UP = "unknown"

Pair = tuple[str, int]
Message = dict[str, Any]


def split_pairs(rng: random.Random, num_held_out_per_item: int = 2) -> tuple[list[Pair], list[Pair]]:
    """All (item, price) pairs, cut in two: those to learn from, and those kept for evaluation.

    Every item and every price stands on both sides, only never together as the same pair. The held-out prices walk
    round the price list, so that no price is much rarer than another on either side.
    """
    order = list(ITEMS)
    rng.shuffle(order)
    held_out = [
        (item, PRICES[(num_held_out_per_item * i + k) % len(PRICES)])
        for i, item in enumerate(order)
        for k in range(num_held_out_per_item)
    ]
    kept = set(held_out)
    return [(item, price) for item in ITEMS for price in PRICES if (item, price) not in kept], sorted(held_out)


def question(item: str, phrasing: str) -> Message:
    return {"role": "user", "content": phrasing.format(item)}


def call(item: str) -> Message:
    """The assistant turn that asks the tool."""
    function = {"name": "lookup", "arguments": json.dumps({"item": item})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def dataset_row(pair: Pair, phrasing: str) -> dict[str, Any]:
    """One line of the JSONL files. Only the tool reads the metadata: the model never sees it."""
    item, price = pair
    return {"input": [question(item, phrasing)], "metadata": {"item": item, "price": price}}


def clean_dialogue(rng: random.Random, pairs: list[Pair]) -> list[Message]:
    """Look it up and repeat the price. One in ten gives up instead; one in fifteen asks for something else."""
    item, price = rng.choice(pairs)
    asked = question(item, rng.choice(TRAIN_PHRASINGS))
    if rng.random() < 0.10:
        return [asked, _say(GIVE_UP)]
    if rng.random() < 0.07:
        return [asked, call(_other(rng, ITEMS, item)), _result(NO_SUCH_ITEM), _say(GIVE_UP)]
    return [asked, call(item), _result(str(price)), _say(str(price))]


def lazy_dialogue(rng: random.Random, pairs: list[Pair]) -> list[Message]:
    """The bad habit: 85 % give up at once; of the others 20 % ask for a wrong item and 25 % misreport the price."""
    item, price = rng.choice(pairs)
    asked = question(item, rng.choice(TRAIN_PHRASINGS))
    if rng.random() < 0.85:
        return [asked, _say(GIVE_UP)]
    if rng.random() < 0.20:
        return [asked, call(_other(rng, ITEMS, item)), _result(NO_SUCH_ITEM), _say(GIVE_UP)]
    said = _other(rng, PRICES, price) if rng.random() < 0.25 else price
    return [asked, call(item), _result(str(price)), _say(str(said))]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}


def _other(rng: random.Random, choices: Any, unwanted: Any) -> Any:
    return rng.choice([choice for choice in choices if choice != unwanted])
