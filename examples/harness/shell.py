"""What the four Python launchers share: the gateway's address, the prompt, and a shell for the model."""

import os
import subprocess
import sys
from pathlib import Path

BASE_URL = os.environ["RELAX_BASE_URL"].rstrip("/")
API_KEY = os.environ["RELAX_SESSION_ID"]
TIMEOUT_S = float(os.environ["HARNESS_TIMEOUT_S"])
MAX_TURNS = int(os.environ.get("HARNESS_MAX_TURNS", "20"))

PROMPT = Path(sys.argv[1]).read_text(encoding="utf-8")
SYSTEM = "You can run shell commands. Answer in plain text when you are done."
DESCRIPTION = "Run a shell command and get its output."
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command for bash."}},
    "required": ["command"],
}


def run_shell(command: str) -> str:
    """Standard output and error of a command, and its status where it is not 0. Never empty."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, errors="replace", timeout=600)
    text = done.stdout + done.stderr
    if done.returncode:
        text += f"\n(exit status {done.returncode})"
    return text or "(no output)"


def finish(answer: str) -> None:
    """Leave the last answer for the reward."""
    Path(sys.argv[2]).write_text(answer, encoding="utf-8")
