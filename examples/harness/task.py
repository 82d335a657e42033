"""The two ends of a session: the task as one prompt, and the reward of the client's last answer.

Usage: task.py prompt | task.py reward ANSWER_FILE
"""

import json
import os
import sys
from pathlib import Path


def read_task():
    return json.loads(Path(os.environ["RELAX_INPUT_JSON"]).read_text(encoding="utf-8"))


def prompt_of(task):
    """The text of the last user message. The clients bring their own system prompts."""
    texts = [message["content"] for message in task.get("messages", ()) if message["role"] == "user"]
    if not texts or not isinstance(texts[-1], str):
        raise SystemExit("the row has no user message of plain text; map one with --input-key")
    return texts[-1]


def output_for(task, answer):
    """1 where the answer holds the row's metadata.answer, else 0. A row without one earns nothing to learn from."""
    wanted = (task.get("metadata") or {}).get("answer")
    if not isinstance(wanted, str):
        raise SystemExit("the row has no metadata.answer (a text); map it with --metadata-key")
    return {"reward": float(wanted in answer), "metadata": {"answer_chars": len(answer)}}


def main(argv):
    task = read_task()
    if argv == ["prompt"]:
        sys.stdout.buffer.write(prompt_of(task).encode())
    elif argv[:1] == ["reward"] and len(argv) == 2:
        output = output_for(task, Path(argv[1]).read_text(encoding="utf-8"))
        Path(os.environ["RELAX_OUTPUT_JSON"]).write_text(json.dumps(output), encoding="utf-8")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
