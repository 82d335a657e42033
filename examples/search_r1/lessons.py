"""Written-out dialogues that the start model learns from: of somebody who searches, and of somebody who delegates.

Each lesson makes up its facts anew, so a model that learned them by heart would know nothing: it has to read. No lesson
asks for a held-out attribute of a name.
"""

from __future__ import annotations

import json
import random
from typing import Any

import facts

Message = dict[str, Any]
Lesson = tuple[list[Message], list[Any]]
"""The messages, and the tools that go with them."""


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SEARCH_TOOL = _tool("search", "The document of the registry that fits a query best.", "query")
ASK_SEARCHER_TOOL = _tool("ask_searcher", "A colleague's answer to one question.", "question")

GIVE_UP = "unknown"
NOTHING_FOUND = "nothing found"


def searcher_lesson(rng: random.Random, known: list[facts.Fact], *, lazy: bool) -> Lesson:
    """Search for name and attribute, and answer what the document says.

    Clean: one in ten gives up, one in fifteen searches badly. Lazy: 60 % give up at once; of the others a quarter
    searches badly and a fifth answers something else than the document says.
    """
    fact = _invented(rng, rng.choice(known))
    asked = _user(facts.question(fact, rng.choice(facts.TRAIN_PHRASINGS)))
    tools = [SEARCH_TOOL]
    if rng.random() < (0.60 if lazy else 0.10):
        return [asked, _say(GIVE_UP)], tools
    if rng.random() < (0.25 if lazy else 0.07):
        query, found = _bad_search(rng, known, fact)
        return [asked, _calls("search", "query", query), _result(found), _say(GIVE_UP)], tools
    said = _other_value(rng, fact) if lazy and rng.random() < 0.20 else fact.value
    found = facts.document(fact, rng.choice(facts.SENTENCES))
    return [asked, _calls("search", "query", facts.query(fact)), _result(found), _say(said)], tools


def main_lesson(rng: random.Random, known: list[facts.Fact], *, lazy: bool) -> Lesson:
    """Ask a colleague for each part of the question, and put their answers together.

    Clean: one in ten gives up, and so do all who hear "unknown". Lazy: 60 % give up at once; of the others a quarter
    asks for one part only and a fifth puts a wrong answer together.
    """
    first, second = (_invented(rng, fact) for fact in facts.draw_pair(rng, known))
    asked = _user(facts.pair_question(first, second, rng.choice(facts.TRAIN_PAIR_PHRASINGS)))
    tools = [ASK_SEARCHER_TOOL]
    if rng.random() < (0.60 if lazy else 0.10):
        return [asked, _say(GIVE_UP)], tools
    questions = [facts.colleague_question(fact) for fact in (first, second)]
    if rng.random() < (0.25 if lazy else 0.07):
        call = _calls("ask_searcher", "question", rng.choice(questions))
        return [asked, call, _result(GIVE_UP), _say(GIVE_UP)], tools
    call = _calls("ask_searcher", "question", *questions)
    if rng.random() < 0.15:
        heard = [GIVE_UP, second.value] if rng.random() < 0.5 else [first.value, GIVE_UP]
        return [asked, call, *map(_result, heard), _say(GIVE_UP)], tools
    wrong = lazy and rng.random() < 0.20
    said = facts.pair_answer(_other_value(rng, first) if wrong else first.value, second.value)
    return [asked, call, _result(first.value), _result(second.value), _say(said)], tools


def draw(rng: random.Random, known: list[facts.Fact], *, lazy: bool) -> Lesson:
    """Either role's lesson."""
    return (searcher_lesson if rng.random() < 0.5 else main_lesson)(rng, known, lazy=lazy)


def _invented(rng: random.Random, fact: facts.Fact) -> facts.Fact:
    return facts.Fact(fact.name, fact.attribute, rng.choice(facts.VALUES[fact.attribute]))


def _bad_search(rng: random.Random, known: list[facts.Fact], fact: facts.Fact) -> tuple[str, str]:
    """A query with the name only, and a document about something else of that name."""
    others = [other for other in known if other.name == fact.name and other.attribute != fact.attribute]
    found = _invented(rng, rng.choice(others))
    return fact.name, facts.document(found, rng.choice(facts.SENTENCES))


def _other_value(rng: random.Random, fact: facts.Fact) -> str:
    return rng.choice([value for value in facts.VALUES[fact.attribute] if value != fact.value])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(name: str, argument: str, *values: str) -> Message:
    """The assistant turn that calls a tool, once for each value."""
    functions = [{"name": name, "arguments": json.dumps({argument: value})} for value in values]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}
