"""The `silva` command."""

from silva.cli.main import main

__all__ = ["main"]
