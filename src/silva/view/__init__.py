"""What a person reads: the progress of a run on the terminal, and runs, sessions, replays and re-exports as text.

Consumes documents of `store` and results of `run`; produces lines of plain text.

Invariant: text of agents and models never drives the terminal. `printable` escapes control characters in all of it.

Open `show.py` first.
"""
