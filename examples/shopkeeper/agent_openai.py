"""The shopkeeper as an ordinary agent on the OpenAI SDK. Nothing in here knows what trains it.

It reads its task, lets the model call `lookup`, and writes down how well it did. `agent.py` does the same, request for
request, without the SDK, whose import alone costs about half a second of CPU in every session.
"""

import json
import os
from pathlib import Path

from openai import OpenAI

MAX_MODEL_CALLS = 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Today's price of an item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]


def lookup(arguments: str, today: dict) -> str:
    """Answer one tool call. `arguments` is the model's own JSON text, so anything may stand in it."""
    try:
        item = json.loads(arguments)["item"]
    except (ValueError, TypeError, KeyError):
        return "no such item"
    return str(today["price"]) if item == today["item"] else "no such item"


def run(client: OpenAI, messages: list, today: dict) -> dict:
    """Talk until the model answers without a tool call. Returns the output document."""
    num_lookups = num_found = 0
    answer = None
    for _ in range(MAX_MODEL_CALLS):
        message = client.chat.completions.create(model="shopkeeper", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_unset=True))  # exactly as it came: the next request must repeat it
        if not message.tool_calls:
            answer = (message.content or "").strip()
            break
        for call in message.tool_calls:
            known = call.function.name == "lookup"
            result = lookup(call.function.arguments, today) if known else "no such tool"
            num_lookups += 1
            num_found += result == str(today["price"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {
        "reward": 1.0 if answer == str(today["price"]) else 0.0,
        "metadata": {
            "used_tool": 1.0 if num_lookups else 0.0,
            "found_item": 1.0 if num_found else 0.0,
            "answered": 0.0 if answer is None else 1.0,
        },
    }


def main() -> None:
    task = json.loads(Path(os.environ["RELAX_INPUT_JSON"]).read_text(encoding="utf-8"))
    # A trainer may hold a request for a long time while it updates the model, hence the timeout.
    client = OpenAI(base_url=os.environ["RELAX_BASE_URL"], api_key=os.environ["RELAX_SESSION_ID"], timeout=9999)
    output = run(client, task["messages"], task["metadata"])
    Path(os.environ["RELAX_OUTPUT_JSON"]).write_text(json.dumps(output), encoding="utf-8")


if __name__ == "__main__":
    main()
