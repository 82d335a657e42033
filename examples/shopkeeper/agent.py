"""The shopkeeper as an agent on the standard library alone, made to start cheaply: `python3 -I -S agent.py`.

A training run starts thousands of these, so what Python imports is what a session costs. This file therefore speaks
HTTP/1.1 on a socket itself. `agent_openai.py` is the same agent, request for request, on the OpenAI SDK.
"""

import json
import os
import socket

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


class ChatClient:
    """POSTs to one Chat Completions endpoint over one kept connection.

    It has no timeout, because a trainer may hold a request while it updates the model.
    """

    def __init__(self, base_url, api_key):
        scheme, _, rest = base_url.rstrip("/").partition("://")
        if scheme != "http":
            raise SystemExit(f"RELAX_BASE_URL is {base_url!r}; this light agent only speaks plain http")
        self.authority, slash, path = rest.partition("/")
        host, colon, port = self.authority.rpartition(":")
        address = (host.strip("[]"), int(port)) if colon and "]" not in port else (self.authority.strip("[]"), 80)
        self.head = (
            f"POST {slash}{path}/v1/chat/completions HTTP/1.1\r\nHost: {self.authority}\r\n"
            f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
        )
        self.socket = socket.create_connection(address)
        self.reader = self.socket.makefile("rb")

    def complete(self, **request):
        body = json.dumps(request).encode()
        self.socket.sendall(f"{self.head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status, reply = self._read_reply()
        if status != 200:
            raise SystemExit(f"the model API answered {status}: {reply.decode(errors='replace')}")
        return json.loads(reply)

    def _read_reply(self):
        status_line = self.reader.readline().split(None, 2)
        if len(status_line) < 2:
            raise SystemExit("the model API closed the connection instead of answering")
        headers = {}
        while line := self.reader.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            return int(status_line[1]), self._read_chunks()
        return int(status_line[1]), self._read_exactly(int(headers.get(b"content-length", b"0")))

    def _read_chunks(self):
        parts = []
        while size := int(self.reader.readline().split(b";")[0], 16):
            parts.append(self._read_exactly(size))
            self.reader.readline()
        while self.reader.readline().strip():  # trailers, then one empty line
            pass
        return b"".join(parts)

    def _read_exactly(self, size):
        data = self.reader.read(size)
        if len(data) != size:
            raise SystemExit(f"the model API broke off after {len(data)} of {size} bytes")
        return data


def lookup(arguments, today):
    """Answer one tool call. `arguments` is the model's own JSON text, so anything may stand in it."""
    try:
        item = json.loads(arguments)["item"]
    except (ValueError, TypeError, KeyError):
        return "no such item"
    return str(today["price"]) if item == today["item"] else "no such item"


def run(client, messages, today):
    """Talk until the model answers without a tool call. Returns the output document."""
    num_lookups = num_found = 0
    answer = None
    for _ in range(MAX_MODEL_CALLS):
        message = client.complete(model="shopkeeper", messages=messages, tools=TOOLS)["choices"][0]["message"]
        messages.append(message)  # exactly as it came: the next request must repeat it
        calls = message.get("tool_calls") or []
        if not calls:
            answer = (message.get("content") or "").strip()
            break
        for call in calls:
            function = call["function"]
            result = lookup(function["arguments"], today) if function["name"] == "lookup" else "no such tool"
            num_lookups += 1
            num_found += result == str(today["price"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return {
        "reward": 1.0 if answer == str(today["price"]) else 0.0,
        "metadata": {
            "used_tool": 1.0 if num_lookups else 0.0,
            "found_item": 1.0 if num_found else 0.0,
            "answered": 0.0 if answer is None else 1.0,
        },
    }


def main():
    with open(os.environ["RELAX_INPUT_JSON"], encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs 5 ms a start
        task = json.load(file)
    client = ChatClient(os.environ["RELAX_BASE_URL"], os.environ["RELAX_SESSION_ID"])
    output = run(client, task["messages"], task["metadata"])
    with open(os.environ["RELAX_OUTPUT_JSON"], "w", encoding="utf-8") as file:  # noqa: PTH123
        json.dump(output, file)


if __name__ == "__main__":
    main()
