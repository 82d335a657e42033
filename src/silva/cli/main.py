"""Commands and exit statuses: 0 done, 1 the run failed, 2 a wrong option or input, 130 and 143 stopped by a signal."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from silva import __version__
from silva.config import add_options
from silva.types import ConfigError, DatasetError, first_silva_error, flag_of

COMMANDS = {
    "train": "Train a model inside an agent program.",
    "rollout": "Run agents and write their samples, without training.",
    "serve": "Serve the model API and an engine alone.",
    "show": "Print a run, or one session of it.",
    "explain": "Show why requests of a session left its known history.",
    "reexport": "Build the samples of a run anew, under other export, reward or credit options, without agents.",
    "check": "Check options, dataset, chat template and agent command before a run.",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="silva", description="Trains a language model inside the agent you already have."
    )
    parser.add_argument("--version", action="version", version=f"silva {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        # The default usage would put a hundred lines of options before each error.
        usage = None if name in ("show", "explain") else f"silva {name} [--config FILE] [--OPTION VALUE ...]"
        usage = f"silva {name} RUN_DIR [--OPTION VALUE ...]" if name == "reexport" else usage
        sub = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        if name == "show":
            _add_show(sub)
            continue
        if name == "explain":
            sub.add_argument("run_dir", help="Folder of a run, live or finished.")
            sub.add_argument("session_id", help="The session.")
            continue
        sub.add_argument("--config", metavar="FILE", help="TOML file of options, by their names with underscores.")
        if name == "reexport":
            _add_reexport(sub)
        if name == "train":
            sub.add_argument("--resume", metavar="RUN_DIR", help="Continue a stopped run, under its own options.")
        if name == "serve":
            sub.add_argument(
                "--open-sessions",
                action="store_true",
                help="Let any bearer key open a session with that id (loopback addresses only).",
            )
            sub.add_argument(
                "--record",
                metavar="FILE",
                help="Append each model request with its answer to this file, as silva check --replay reads it.",
            )
        if name == "check":
            sub.add_argument(
                "--no-agent-run", action="store_true", help="Do not run the agent command on the first row."
            )
            sub.add_argument(
                "--replay",
                metavar="FILE",
                help="Check a recorded client instead: would its session be linear? One JSON object a line: method, "
                "path, body, and where known response, session, headers.",
            )
            sub.add_argument("--json", action="store_true", help="With --replay: one JSON document.")
        add_options(sub)
    return parser


def _add_show(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", help="Folder of a run, live or finished.")
    sub.add_argument("session_id", nargs="?", help="Print this session.")
    sub.add_argument("--json", action="store_true", help="One JSON document on standard output.")
    sub.add_argument("--full", action="store_true", help="Do not shorten long token lists.")


def _add_reexport(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("recorded", metavar="RUN_DIR", help="Folder of a run, live or finished; its options apply here.")
    sub.add_argument(
        "--out",
        metavar="FILE",
        help="File for each rollout's samples; {rollout_id} in the path stands for the step (default: "
        "RUN_DIR/reexport/{rollout_id}.jsonl).",
    )
    sub.add_argument("--force", action="store_true", help="Overwrite files that exist.")
    sub.add_argument("--json", action="store_true", help="The summary as one JSON document.")


def _unknown(args: argparse.Namespace, words: Sequence[str]) -> str:
    """The error for words that the command does not know: the first of them, with a close option."""
    if not words[0].startswith("-"):
        return f"{words[0]!r} belongs to no option (silva {args.command} --help lists all)"
    names = [flag_of(name) for name in vars(args)]
    close = difflib.get_close_matches(words[0].partition("=")[0], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown option {words[0]}{hint} (silva {args.command} --help lists all)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    args, unknown = build_parser().parse_known_args(argv)
    try:
        if unknown:
            raise ConfigError(_unknown(args, unknown))
        return importlib.import_module(f"silva.cli.{args.command}").run(args)
    except BaseException as error:
        found = first_silva_error(error)
        if found is not None:
            print(f"silva {args.command}: error: {found}", file=sys.stderr)
            return 2 if isinstance(found, (ConfigError, DatasetError)) else 1
        if isinstance(error, KeyboardInterrupt):
            return 130
        if isinstance(error, BrokenPipeError):
            sys.stderr.close()
            return 1
        raise
