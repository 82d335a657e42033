"""The search service: BM25 over a JSONL corpus, behind HTTP. Started once, outside the agents, which all share it.

    python3 examples/search_r1/search_service.py --corpus runs/search_r1/start/corpus.jsonl --ready-file search.url

    POST /search  {"queries": ["Tolven pet"], "top_k": 1}
              ->  {"results": [[{"id": 3, "text": "The pet of Tolven is owl.", "score": 5.1}]]}
    GET  /health  {"status": "ok", "num_documents": 200}

A query gets at most `top_k` documents, the best first, and none that shares no word with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import bm25s
from aiohttp import web

MAX_QUERIES = 256


class Index:
    """BM25 over the texts of a corpus of `{"id", "text"}`."""

    def __init__(self, documents: list[dict[str, Any]]):
        self.documents = documents
        self._bm25 = bm25s.BM25()
        texts = [document["text"] for document in documents]
        self._bm25.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def search(self, queries: list[str], top_k: int) -> list[list[dict[str, Any]]]:
        words = bm25s.tokenize(queries, stopwords="en", return_ids=False, show_progress=False)
        depth = min(top_k, len(self.documents))
        ids_QK, scores_QK = self._bm25.retrieve(words, k=depth, show_progress=False)
        return [
            [
                {**self.documents[i], "score": float(score)}
                for i, score in zip(ids_K, scores_K, strict=True)
                if score > 0
            ]
            for ids_K, scores_K in zip(ids_QK.tolist(), scores_QK.tolist(), strict=True)
        ]


def read_corpus(path: Path) -> list[dict[str, Any]]:
    """The documents of a JSONL file; a line without id and text is refused by its number."""
    documents = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            document = json.loads(line)
            if not isinstance(document, dict) or not isinstance(document.get("text"), str) or "id" not in document:
                raise ValueError(f'{path}:{number}: a document needs "id" and a text in "text"')
            documents.append(document)
    if not documents:
        raise ValueError(f"{path} holds no documents")
    return documents


def make_app(index: Index) -> web.Application:
    async def search(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _refuse(f"the body is not JSON: {error}")
        queries = body.get("queries") if isinstance(body, dict) else None
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return _refuse('"queries" must be a list of texts')
        if not 1 <= len(queries) <= MAX_QUERIES:
            return _refuse(f'"queries" must hold 1 to {MAX_QUERIES} texts, not {len(queries)}')
        top_k = body.get("top_k", 1)
        if type(top_k) is not int or top_k < 1:
            return _refuse(f'"top_k" must be a positive integer, not {top_k!r}')
        return web.json_response({"results": index.search(queries, top_k)})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "num_documents": len(index.documents)})

    app = web.Application()
    app.add_routes([web.post("/search", search), web.get("/health", health)])
    return app


def _refuse(message: str) -> web.Response:
    return web.json_response({"error": message}, status=400)


async def serve(index: Index, host: str, port: int, ready_file: Path | None, *, stop_with_parent: bool) -> None:
    """Answer until SIGINT or SIGTERM, or until the process that started this one is gone."""
    parent = os.getppid()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(make_app(index), access_log=None, keepalive_timeout=3600.0)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    url = f"http://{host}:{runner.addresses[0][1]}"
    print(f"search service: ready url={url} documents={len(index.documents)}", flush=True)
    if ready_file is not None:
        unfinished = ready_file.with_name(ready_file.name + ".part")
        unfinished.write_text(url + "\n", encoding="utf-8")
        unfinished.replace(ready_file)
    while not stop.is_set() and not (stop_with_parent and os.getppid() != parent):
        try:
            await asyncio.wait_for(stop.wait(), timeout=0.5)
        except TimeoutError:
            pass
    await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="BM25 search over a JSONL corpus, behind HTTP.")
    parser.add_argument("--corpus", type=Path, required=True, help='JSONL file of {"id", "text"}')
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default 0: a free one)")
    parser.add_argument("--ready-file", type=Path, help="file that gets the address once requests are answered")
    parser.add_argument("--stop-with-parent", action="store_true", help="end when the starting process has ended")
    options = parser.parse_args(argv)
    try:
        index = Index(read_corpus(options.corpus))
    except (OSError, ValueError) as error:
        print(f"search service: {error}", file=sys.stderr)
        return 2
    asyncio.run(serve(index, options.host, options.port, options.ready_file, stop_with_parent=options.stop_with_parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
