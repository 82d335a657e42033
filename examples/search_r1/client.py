"""What the two agents share, on the standard library alone: HTTP, the search tool, and a conversation with the model.

A training run starts thousands of agents, so what Python imports is what a session costs: this file speaks HTTP/1.1 on
a socket itself, because importing `http.client` would double the CPU of a start.
"""

import json
import socket

MAX_MODEL_CALLS = 3
SEARCH_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "The document of the registry that fits a query best.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
NOTHING_FOUND = "nothing found"


class ServiceError(Exception):
    """A service refused a request or went away."""


class JsonClient:
    """POSTs JSON over one kept connection.

    It has no timeout, because a trainer may hold a request while it updates the model.
    """

    def __init__(self, base_url, key=""):
        scheme, _, rest = base_url.rstrip("/").partition("://")
        if scheme != "http":
            raise ServiceError(f"{base_url!r}: these light agents only speak plain http")
        authority, slash, path = rest.partition("/")
        host, colon, port = authority.rpartition(":")
        address = (host.strip("[]"), int(port)) if colon and "]" not in port else (authority.strip("[]"), 80)
        self.prefix = slash + path
        self.headers = f"Host: {authority}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        self.socket = socket.create_connection(address)
        self.reader = self.socket.makefile("rb")

    def post(self, path, document):
        body = json.dumps(document).encode()
        head = f"POST {self.prefix}{path} HTTP/1.1\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        status, reply = self._read_reply()
        if status != 200:
            raise ServiceError(f"{path} answered {status}: {reply.decode(errors='replace')}")
        return json.loads(reply)

    def _read_reply(self):
        status_line = self.reader.readline().split(None, 2)
        if len(status_line) < 2:
            raise ServiceError("the connection was closed instead of an answer")
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
            raise ServiceError(f"the connection broke off after {len(data)} of {size} bytes")
        return data


def converse(model, messages, tools, answer_calls):
    """Let the model talk until it answers without a tool call; returns that answer, or None after too many turns.

    `messages` grows by everything that was said, and ends with what the model said last. `answer_calls` gets the called
    functions of one turn, and returns a text for each.
    """
    for num_left in reversed(range(MAX_MODEL_CALLS)):
        request = {"model": "searcher", "messages": messages, "tools": tools}
        message = model.post("/v1/chat/completions", request)["choices"][0]["message"]
        messages.append(message)  # exactly as it came: the next request must repeat it
        calls = message.get("tool_calls") or []
        if not calls:
            return (message.get("content") or "").strip()
        if num_left:
            results = answer_calls([call["function"] for call in calls])
            for call, result in zip(calls, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return None


def text_argument(function, tool, argument):
    """The text that the model gave `tool`, or None. Arguments are the model's own JSON: anything may stand there."""
    if function["name"] != tool:
        return None
    try:
        text = json.loads(function["arguments"])[argument]
    except (ValueError, TypeError, KeyError):
        return None
    if not isinstance(text, str) or not text.strip():
        return None
    return text.encode(errors="replace").decode()


class Searcher:
    """One conversation that may search: a question in, an answer out. Keeps the messages and the documents it read."""

    def __init__(self, model, search, messages):
        self.model = model
        self.search = search
        self.messages = messages
        self.documents = []

    def answer(self):
        return converse(self.model, self.messages, SEARCH_TOOLS, self._run_calls)

    def _run_calls(self, functions):
        """All queries of a turn go to the service at once."""
        queries = [text_argument(function, "search", "query") for function in functions]
        asked = [query for query in queries if query is not None]
        found = iter(self.search.post("/search", {"queries": asked, "top_k": 1})["results"] if asked else [])
        results = [self._read(next(found)) if query is not None else NOTHING_FOUND for query in queries]
        return results

    def _read(self, hits):
        if not hits:
            return NOTHING_FOUND
        self.documents.append(hits[0]["text"])
        return hits[0]["text"]

    def found(self, wanted):
        """Whether a document that it read holds the word `wanted`."""
        return any(wanted in document.rstrip(".").split() for document in self.documents)
