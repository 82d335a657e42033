"""An invented town: who lives there, what its registry says of them, and questions about it.

Everything random comes from the `random.Random` that the caller passes in. No torch, no transformers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_NAME_WORDS = """
Abrin Bolda Corvo Dessa Elgar Fenna Gorlo Hilda Ivor Jorun Kelda Lomir Marna Nerys Odrin Perla Quill Rosko Sabra Tolven
Ulrik Vesna Wendo Xanthe Yorick Zelda Brona Cedric Dorrit Fabro Greta Jarmo Lotte Orsin Petra Runa Sigrid Tamsin Velma
Wystan
"""
NAMES = tuple(_NAME_WORDS.split())

VALUES: dict[str, tuple[str, ...]] = {
    "pet": ("cat", "dog", "goat", "owl", "mule"),
    "trade": ("baker", "smith", "tailor", "miller", "potter"),
    "drink": ("tea", "milk", "cider", "cocoa", "mead"),
    "boat": ("Heron", "Tempest", "Otter", "Lantern", "Falcon"),
    "home": ("Eastmoor", "Holmby", "Stonewick", "Greyford", "Ashcombe"),
}
ATTRIBUTES = tuple(VALUES)

# The registry words a fact in one of two ways, so that the answer does not always stand in the same place.
SENTENCES = ("The {attribute} of {name} is {value}.", "{name} gives {value} as {attribute}.")

TRAIN_PHRASINGS = (
    "{attribute} of {name}?",
    "the {attribute} of {name}?",
    "what is the {attribute} of {name}?",
    "tell me the {attribute} of {name}",
    "{name}: {attribute}?",
    "{name}: the {attribute}?",
)
EVAL_PHRASINGS = ("what is {attribute} of {name}?", "tell me {attribute} of {name}", "the {attribute}, {name}?")

TRAIN_PAIR_PHRASINGS = ("{first} and {second}?", "what is {first} and {second}?", "tell me {first} and {second}")
EVAL_PAIR_PHRASINGS = ("what {first} and {second}?", "tell {first} and {second}?")


@dataclass(frozen=True, order=True)
class Fact:
    """One line of the registry."""

    name: str
    attribute: str
    value: str


def all_facts(rng: random.Random) -> list[Fact]:
    """One fact for each name and attribute. Every value is given to equally many names."""
    facts = []
    for attribute, values in VALUES.items():
        given = [values[i % len(values)] for i in range(len(NAMES))]
        rng.shuffle(given)
        facts += [Fact(name, attribute, value) for name, value in zip(NAMES, given, strict=True)]
    return sorted(facts)


def split_facts(rng: random.Random, facts: list[Fact]) -> tuple[list[Fact], list[Fact]]:
    """The facts to learn from, and those kept for evaluation: one attribute of every name, all attributes in turn."""
    names = list(NAMES)
    rng.shuffle(names)
    kept = {(name, ATTRIBUTES[i % len(ATTRIBUTES)]) for i, name in enumerate(names)}
    held_out = [fact for fact in facts if (fact.name, fact.attribute) in kept]
    return [fact for fact in facts if (fact.name, fact.attribute) not in kept], held_out


def document(fact: Fact, sentence: str) -> str:
    """The sentence that the registry keeps of a fact."""
    return sentence.format(name=fact.name, attribute=fact.attribute, value=fact.value)


def corpus(rng: random.Random, facts: list[Fact]) -> list[dict[str, Any]]:
    """The documents `{"id", "text"}`, one a fact."""
    return [{"id": i, "text": document(fact, rng.choice(SENTENCES))} for i, fact in enumerate(facts)]


def question(fact: Fact, phrasing: str) -> str:
    return phrasing.format(name=fact.name, attribute=fact.attribute)


def sub_question(fact: Fact) -> str:
    """How a fact stands inside a two-part question."""
    return f"{fact.attribute} of {fact.name}"


def query(fact: Fact) -> str:
    """A good query: both words that only this fact's document holds together."""
    return f"{fact.name} {fact.attribute}"


def colleague_question(fact: Fact) -> str:
    return sub_question(fact) + "?"


def pair_question(first: Fact, second: Fact, phrasing: str) -> str:
    return phrasing.format(first=sub_question(first), second=sub_question(second))


def pair_answer(first: str, second: str) -> str:
    return f"{first} and {second}"


def draw_pair(rng: random.Random, facts: list[Fact]) -> tuple[Fact, Fact]:
    """Two facts of two people."""
    first = rng.choice(facts)
    return first, rng.choice([fact for fact in facts if fact.name != first.name])


def single_row(fact: Fact, phrasing: str) -> dict[str, Any]:
    """One line of the single agent's JSONL files. Only the scoring reads the metadata: the model never sees it."""
    message = {"role": "user", "content": question(fact, phrasing)}
    return {"input": [message], "metadata": {"answer": fact.value}}


def team_row(first: Fact, second: Fact, phrasing: str) -> dict[str, Any]:
    """One line of the team's JSONL files: the answer to each part, in the order of the question."""
    message = {"role": "user", "content": pair_question(first, second, phrasing)}
    return {"input": [message], "metadata": {"answers": [first.value, second.value]}}
