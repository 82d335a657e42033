"""`silva show`: a run or a session as text or JSON."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from silva.store import show_run, show_session, to_json
from silva.view import render_run, render_session


def run(args: argparse.Namespace) -> int:
    if args.session_id is None:
        document = show_run(args.run_dir)
        print(to_json(document) if args.json else render_run(document))
    else:
        document = show_session(args.run_dir, args.session_id)
        decode = None if args.json else token_decoder(Path(args.run_dir))
        print(to_json(document) if args.json else render_session(document, decode, full=args.full))
    return 0


def token_decoder(run_dir: Path) -> Callable[[list[int]], str] | None:
    """Turns ids to text by the run's own tokenizer; None where its files are gone, since a run can be read without."""
    try:
        folder = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))["hf_checkpoint"]
        data = (Path(folder) / "tokenizer.json").read_bytes()
    except (OSError, ValueError, KeyError):
        return None
    tokenizer = Tokenizer.from_buffer(data)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
