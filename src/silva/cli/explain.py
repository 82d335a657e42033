"""`silva explain`: why requests of a session left its known history."""

from __future__ import annotations

import argparse

from silva.store import show_session
from silva.view import render_explanation


def run(args: argparse.Namespace) -> int:
    print(render_explanation(show_session(args.run_dir, args.session_id)), end="")
    return 0
