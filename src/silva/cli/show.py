"""`silva show`: a run or a session as text or JSON."""

from __future__ import annotations

import argparse

from silva.store.encode import to_json
from silva.store.queries import show_run, show_session
from silva.view.show import render_run, render_session


def run(args: argparse.Namespace) -> int:
    if args.session_id is None:
        document = show_run(args.run_dir)
        print(to_json(document) if args.json else render_run(document))
    else:
        document = show_session(args.run_dir, args.session_id)
        print(to_json(document) if args.json else render_session(document, full=args.full))
    return 0
