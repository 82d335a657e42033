"""A team that answers a two-part question: `python3 -I -S team_agent.py`.

One process, up to three conversations with the same model under the same key. The main one cannot search; it asks
searchers, which work side by side, and puts their answers together. Each conversation is written down as a record of
its own, so that each is trained with its own credit (`advantage.py`). The search service's address is in SEARCH_URL.
"""

import json
import os
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib costs 5 ms a start

from client import SEARCH_TOOLS, JsonClient, Searcher, ServiceError, converse, text_argument

NUM_SEARCHERS = 2
ASK_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "ask_searcher",
            "description": "A colleague's answer to one question.",
            "parameters": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
        },
    }
]
NO_QUESTION = "no question"
NOBODY_FREE = "nobody is free"
NO_ANSWER = "no answer"


class Colleague(threading.Thread):
    """One searcher at work on one question, with connections of its own."""

    def __init__(self, question):
        super().__init__()
        self.messages = [{"role": "user", "content": question}]
        self.report = None
        self.done = False

    def run(self):
        model = JsonClient(os.environ["RELAX_BASE_URL"], os.environ["RELAX_SESSION_ID"])
        self.report = Searcher(model, JsonClient(os.environ["SEARCH_URL"]), self.messages).answer()
        self.done = True

    def record(self, name, answers, outcome):
        useful = 1.0 if self.report in answers else 0.0
        metadata = {"role": "searcher", "outcome": outcome, "usefulness": useful}
        return {"name": name, "messages": self.messages, "tools": SEARCH_TOOLS, "metadata": metadata}


class Team:
    """The main conversation and those whom it asked."""

    def __init__(self, model, messages, answers):
        self.model = model
        self.messages = messages
        self.answers = answers
        self.colleagues = []

    def work(self):
        """Returns the records: main's first, then one for each searcher that was asked."""
        answer = converse(self.model, self.messages, ASK_TOOLS, self._delegate)
        outcome = 1.0 if answer == " and ".join(self.answers) else 0.0
        metadata = {"role": "main", "outcome": outcome, "num_asked": len(self.colleagues)}
        main = {"name": "main", "messages": self.messages, "tools": ASK_TOOLS, "metadata": metadata, "reward": outcome}
        searchers = [who.record(f"searcher_{i}", self.answers, outcome) for i, who in enumerate(self.colleagues)]
        return [main, *searchers]

    def _delegate(self, functions):
        """Start a searcher for each question of a turn, all at once, and wait for their reports."""
        asked = [self._assign(text_argument(function, "ask_searcher", "question")) for function in functions]
        at_work = [who for who in asked if isinstance(who, Colleague)]
        for who in at_work:
            who.start()
        for who in at_work:
            who.join()
        if not all(who.done for who in at_work):
            raise ServiceError("a searcher broke off; its traceback stands above")
        return [(who.report or NO_ANSWER) if isinstance(who, Colleague) else who for who in asked]

    def _assign(self, question):
        """A colleague who will find out, or the text that says why there is none."""
        if question is None:
            return NO_QUESTION
        if len(self.colleagues) == NUM_SEARCHERS:
            return NOBODY_FREE
        self.colleagues.append(Colleague(question))
        return self.colleagues[-1]


def main():
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:  # noqa: PTH123
        task = json.load(file)
    model = JsonClient(os.environ["RELAX_BASE_URL"], os.environ["RELAX_SESSION_ID"])
    records = Team(model, task["messages"], task["metadata"]["answers"]).work()
    if os.environ["RELAX_ROLLOUT_MODE"] == "eval":
        records = records[:1]  # only the outcome counts there
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:  # noqa: PTH123
        file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
