"""Silva trains a language model inside the agent that people already have.

    import silva

    run = silva.open_run("run.toml")
    result = await run.train()

`open_run` is the door; `run/run.py` shows what it takes and returns. Names are loaded when they are first used, so
`import silva` stays light.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` itself is slow to import, and the runner process does without it
if TYPE_CHECKING:
    from silva.config import RunConfig
    from silva.run import EngineFactory, Run, Runner, RunnerFactory, RunResult, RunWatcher, open_run

__version__ = "0.1.0"

__all__ = ["EngineFactory", "Run", "RunConfig", "RunResult", "RunWatcher", "Runner", "RunnerFactory", "open_run"]

_HOMES = {
    "EngineFactory": "silva.run.factories",
    "Run": "silva.run.run",
    "RunConfig": "silva.config.options",
    "RunResult": "silva.run.setup",
    "RunWatcher": "silva.run.watcher",
    "Runner": "silva.run.factories",
    "RunnerFactory": "silva.run.factories",
    "open_run": "silva.run.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'silva' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
