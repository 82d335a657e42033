"""What a person reads: the progress of a run on the terminal, and runs, sessions, replays and re-exports as text.

Consumes documents of `store` and results of `run`; produces lines of plain text.

Invariant: text of agents and models never drives the terminal. `printable` escapes control characters in all of it.

Open `show.py` first.
"""

from silva.view.console import RunView
from silva.view.explain import render_explanation
from silva.view.reexport import render_summary
from silva.view.replay import render_replay
from silva.view.show import render_run, render_session

__all__ = ["RunView", "render_explanation", "render_replay", "render_run", "render_session", "render_summary"]
