"""One agent that answers a question from the registry: `python3 -I -S search_agent.py`.

It reads its task, lets the model search, and writes down whether the answer was right. It expects the address of the
search service in SEARCH_URL.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib costs 5 ms a start

from client import JsonClient, Searcher


def run(model, search, messages, wanted):
    """Returns the output document."""
    searcher = Searcher(model, search, messages)
    answer = searcher.answer()
    return {
        "reward": 1.0 if answer == wanted else 0.0,
        "metadata": {
            "searched": 1.0 if len(messages) > 2 else 0.0,
            "found": 1.0 if searcher.found(wanted) else 0.0,
        },
    }


def main():
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:  # noqa: PTH123
        task = json.load(file)
    model = JsonClient(os.environ["RELAX_BASE_URL"], os.environ["RELAX_SESSION_ID"])
    search = JsonClient(os.environ["SEARCH_URL"])
    output = run(model, search, task["messages"], task["metadata"]["answer"])
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(output, file)


if __name__ == "__main__":
    main()
