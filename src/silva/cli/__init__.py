"""The `silva` command: parses options, calls `silva.run`, prints.

Consumes the command line. Produces text, an exit status (see `main.py`) and nothing else: whatever a command does is in
`run/`, `store/` or `view/`. `loop.py` is the only place that starts an event loop and handles signals.

Open first: `main.py`.
"""

from silva.cli.main import main

__all__ = ["main"]
