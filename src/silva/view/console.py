"""What a person sees while a run goes on: log lines, results, a progress bar where the output is a terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from silva.types import Mode, first_silva_error

RESULTS = logging.getLogger("silva.results")
"""Lines that are a run's result: they go to standard output, everything else to standard error."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console, *, results: bool):
        super().__init__(logging.INFO)
        self._console = console
        self._results = results

    def emit(self, record: logging.LogRecord) -> None:
        if (record.name == RESULTS.name) != self._results:
            return
        text = record.getMessage() if self._results else self.format(record)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunView:
    """Routes log records to the run's log file, results to stdout, the rest to stderr, and draws the progress bar.

    `quiet` keeps everything but the log file silent. The bar counts sessions that were scored in the step at hand; it
    is drawn only on a terminal.
    """

    def __init__(self, log_path: Path | None = None, *, quiet: bool = False):
        self._errors = Console(file=sys.stderr, quiet=quiet)
        self._results = Console(file=sys.stdout, quiet=quiet)
        if self._results.is_terminal and self._errors.is_terminal:
            self._results = self._errors  # one terminal has one writer, or lines would run into the bar
        self._log_path = log_path
        self._handlers: list[logging.Handler] = []
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> RunView:
        formatter = logging.Formatter(_FORMAT)
        self._handlers = [
            _ConsoleHandler(self._errors, results=False),
            _ConsoleHandler(self._results, results=True),
        ]
        if self._log_path is not None:
            self._handlers.append(logging.FileHandler(self._log_path, encoding="utf-8", errors="backslashreplace"))
        root = logging.getLogger("silva")
        root.setLevel(logging.INFO)
        root.propagate = False
        for handler in self._handlers:
            handler.setFormatter(formatter)
            root.addHandler(handler)
        if self._errors.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("scored {task.completed}/{task.total}"),
            )
            progress = Progress(*columns, TimeElapsedColumn(), console=self._errors, transient=True)
            progress.start()
            self._progress = progress
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        root = logging.getLogger("silva")
        if error is not None:
            self._log_end(error)
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        self._handlers = []

    def _log_end(self, error: BaseException) -> None:
        """Write why the run ended to its log; whoever catches the error prints it on the terminal."""
        found = first_silva_error(error)
        trace = None if found is not None else (type(error), error, error.__traceback__)
        text = str(found) if found is not None else f"ended by {type(error).__name__}"
        record = logging.LogRecord("silva", logging.ERROR, __file__, 0, text, None, trace)
        for handler in self._handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(record)

    def say(self, text: str) -> None:
        """Print a result."""
        RESULTS.info("%s", text)

    def begin_step(self, title: str, num_sessions: int) -> None:
        """Start the bar anew for a step of so many sessions."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(title, total=num_sessions)

    def scored(self, mode: Mode) -> None:
        """One more session has its reward, or failed."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
