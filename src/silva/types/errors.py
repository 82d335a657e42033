"""Errors that people read. Each says what is wrong, where, the value and what to do.

`SilvaError` subclasses are for users; a broken promise between our own parts is an `AssertionError`.
"""

from __future__ import annotations

from typing import Literal


class SilvaError(ValueError):
    """Base of all errors whose text is meant for a user."""


class ConfigError(SilvaError):
    """An option, or a combination of options, that cannot work. The command ends with exit status 2."""


class DatasetError(SilvaError):
    """A dataset file or row that cannot be used."""


class RequestError(SilvaError):
    """A model request that cannot be served. Always the client's fault: a 4xx, never a 5xx.

    `field` is the path of the offending value, such as `messages[3].content`; `code` is a stable machine word.
    """

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.field = field
        self.code = code
        self.status = status


class TransitionRefused(RequestError):
    """The chat template refuses, or renders impurely, the step from a known state to the new messages.

    `raised`: the template itself raised an error.
    """

    def __init__(self, message: str, *, field: str | None = None, raised: bool = False):
        super().__init__(message, field=field, code="template_refused")
        self.raised = raised

    def at(self, field: str | None) -> TransitionRefused:
        """The same refusal at another place."""
        return TransitionRefused(str(self), field=field, raised=self.raised)


class EngineFault(SilvaError):
    """The inference engine failed: an error reply, a reset, no answer in time, or one that breaks its contract."""


class StorageFault(SilvaError):
    """A file of the run cannot be written: the disk is full, or not ours to write."""


class SessionFailure(SilvaError):
    """One session cannot yield a sample. `reason` is the stable word that the ledger counts."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class GroupEnd(SilvaError):
    """A whole group cannot be trained, or is not to be: its prompt ends as `state` with the ledger's `reason`."""

    def __init__(self, reason: str, message: str, *, state: Literal["dropped", "filtered"] = "dropped"):
        super().__init__(message)
        self.reason = reason
        self.state: Literal["dropped", "filtered"] = state


class AgentExecutionError(SessionFailure):
    """The agent process failed. The message ends with the last part of the agent's own log."""

    def __init__(self, reason: str, message: str, *, log_tail: str = ""):
        super().__init__(reason, f"{message}\n--- end of the agent's log ---\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


def system_reason(error: Exception) -> str:
    """What went wrong, without the number and the path that an OSError repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def first_silva_error(error: BaseException) -> SilvaError | None:
    """The first error for people inside an exception (groups of tasks wrap theirs)."""
    if isinstance(error, SilvaError):
        return error
    parts: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    found = (first_silva_error(part) for part in parts)
    return next((part for part in found if part is not None), None)


class RunStopped(SilvaError):
    """The run cannot go on (failure budget spent, engine gone for good, dataset empty)."""
