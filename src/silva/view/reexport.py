"""The summary of `silva reexport` as text."""

from __future__ import annotations

from silva.types import JsonObject


def render_summary(document: JsonObject) -> str:
    """What became of sessions and groups, as recorded and as made anew."""
    lines = [f"run: {document['run']}"]
    for mode in ("train", "eval"):
        if mode in document:
            lines += _mode(mode, document[mode])
    files = document["files"]
    lines.append(f"files: {files[0]}{f' ... {files[-1]}' if len(files) > 1 else ''} ({len(files)})" if files else "")
    return "\n".join(line for line in lines if line) if len(lines) > 2 else f"{lines[0]}\nit holds no sessions"


def _mode(mode: str, account: JsonObject) -> list[str]:
    before, after = account["before"], account["after"]
    lines = [f"{mode}:  as recorded -> now"]
    for what in ("sessions", "groups"):
        for state in sorted({*before[what], *after[what]}):
            reasons = sorted({*before[what].get(state, {}), *after[what].get(state, {})})
            lines += [
                f"  {what} {state}{'' if reason == 'none' else f' ({reason})'}: "
                f"{before[what].get(state, {}).get(reason, 0)} -> {after[what].get(state, {}).get(reason, 0)}"
                for reason in reasons
            ]
    lines.append(f"  contexts: {before['num_contexts']} -> {after['num_contexts']}")
    lines.append(f"  reward: {_reward(before)} -> {_reward(after)}")
    if account["num_left_out"]:
        lines.append(f"  left out: {account['num_left_out']} retries of slots whose earlier session is exported now")
    if account["num_without_credit"]:
        lines.append(f"  without credit: {account['num_without_credit']} sessions, whose reward makes none")
    return lines


def _reward(side: JsonObject) -> str:
    mean = side["mean_reward"]
    return "none" if mean is None else f"{mean:.4g} (of {side['num_rewards']})"
