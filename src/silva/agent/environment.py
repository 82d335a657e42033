"""The environment of an agent.

The contract's variables give the agent its task and the address of the model. It also inherits the trainer's
environment, except for:

    what looks like a secret                      see `withheld_names`
    addresses and keys of model services          an agent that ignores the contract's variables then fails, and
                                                  does not ask a paid model
    settings of silva for its numeric libraries   the agent gets the values that silva was started with

`--agent-env` passes a withheld variable on purpose. `--agent-env-clear` leaves only the few variables that a program
needs to run.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from silva.agent.files import SessionFiles
from silva.processes import RUN_MARKER
from silva.types import ConfigError, Mode

CONTRACT_PREFIX = "RELAX_"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET_ENDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
_SECRET_WORDS = frozenset({*_SECRET_ENDS, "KEYS", "TOKENS", "SECRETS", "PASSWORDS", "PWD", "PAT", "AUTH", "COOKIE"})
_NO_SECRET = frozenset({"PWD", "OLDPWD"})
_SERVICES = ("OPENAI_", "ANTHROPIC_", "AZURE_OPENAI_")
_LOGIN_IN_URL = re.compile(r"(?<!ssh)://[^/@\s]+@")
_NUMERIC = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS"),
    "TOKENIZERS_PARALLELISM",
)
_NEEDED = frozenset({"PATH", "HOME", "LANG", "TMPDIR", "TERM", "USER", "SHELL"})
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def parse_agent_env(items: Iterable[str]) -> dict[str, str]:
    """Return the `K=V` items of --agent-env as a mapping. Raises ConfigError for invalid and reserved names."""
    env: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(
                f"--agent-env {item!r} has no '='; write NAME=VALUE (to pass on yours: {item}=\"${item}\")"
            )
        if not _NAME.match(name):
            raise ConfigError(
                f"--agent-env {item!r}: {name!r} is no variable name (letters, digits and _, no leading digit)"
            )
        if name.startswith(CONTRACT_PREFIX) or name == RUN_MARKER:
            raise ConfigError(
                f"--agent-env {name}: this name is reserved, silva sets it for every agent; choose another one"
            )
        if name in env:
            raise ConfigError(f"--agent-env gives {name} twice, as {env[name]!r} and {value!r}; keep one")
        if "\0" in value:
            raise ConfigError(f"--agent-env {name}: the value contains a NUL byte, which no environment can carry")
        env[name] = value
    return env


def agent_environment(
    *,
    files: SessionFiles,
    base_url: str,
    session_id: str,
    mode: Mode,
    group_id: str,
    run_id: str,
    agent_env: Mapping[str, str] | None = None,
    env_clear: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the whole environment of one agent.

    `base`: what it inherits from (None: this process's environment as its user gave it). The folder of the running
    interpreter comes first in PATH unless `agent_env` sets PATH. If a proxy is configured, the gateway's host is
    exempted from it.
    """
    agent_env = agent_env or {}
    source = trainer_environment() if base is None else base
    if env_clear:
        env = {name: value for name, value in source.items() if name in _NEEDED or name.startswith("LC_")}
    else:
        env = {name: value for name, value in source.items() if not _is_withheld(name, value)}
    env["PATH"] = _path(env.get("PATH"))
    env.update(agent_env)
    if any(env.get(name) for name in _PROXIES):
        _exempt_from_proxy(env, urlsplit(base_url).hostname, agent_env)
    env.update(
        {
            "RELAX_INPUT_JSON": str(files.input_json),
            "RELAX_OUTPUT_JSON": str(files.output_json),
            "RELAX_SESSION_IO_DIR": str(files.io_dir),
            "RELAX_BASE_URL": base_url,
            "RELAX_SESSION_ID": session_id,
            "RELAX_ROLLOUT_MODE": mode,
            "RELAX_GROUP_ID": group_id,
            RUN_MARKER: run_id,
        }
    )
    return env


def withheld_names(base: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables of the trainer that agents get only if --agent-env names them, sorted."""
    source = trainer_environment() if base is None else base
    return sorted(name for name, value in source.items() if _is_withheld(name, value))


def looks_secret(name: str, value: str = "") -> bool:
    """Whether a variable is probably a secret.

    True if a word of the name (split at `_`) or its end is key, token, secret, password, credential or the like, or if
    the value is an address that contains a login. Proxy addresses may contain one: agents need them for the network.
    """
    upper = name.upper()
    if upper in _NO_SECRET:
        return False
    if upper.endswith(_SECRET_ENDS) or not _SECRET_WORDS.isdisjoint(upper.split("_")):
        return True
    return not upper.endswith("_PROXY") and _LOGIN_IN_URL.search(value) is not None


def trainer_environment() -> dict[str, str]:
    """Return this process's environment as its user gave it, with the numeric-library settings from its start."""
    env = dict(os.environ)
    at_start = _environment_at_start()
    for name in _NUMERIC:
        env.pop(name, None)
        if name in at_start:
            env[name] = at_start[name]
    return env


@functools.cache
def _environment_at_start() -> dict[str, str]:
    """Return the environment that this process was started with, from the kernel; the current one without /proc."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (entry.partition(b"=") for entry in block.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _is_withheld(name: str, value: str) -> bool:
    if name.startswith(CONTRACT_PREFIX) or name == RUN_MARKER:
        return True
    return name.upper().startswith(_SERVICES) or looks_secret(name, value)


def _path(inherited: str | None) -> str:
    """Return the inherited PATH after the folder of this interpreter (of the virtual environment, if it is one)."""
    first = str(Path(sys.executable).parent)
    rest = [part for part in (inherited or os.defpath).split(os.pathsep) if part != first]
    return os.pathsep.join([first, *rest])


def _exempt_from_proxy(env: dict[str, str], host: str | None, agent_env: Mapping[str, str]) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        if name in agent_env:
            continue
        hosts = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
        if "*" not in hosts:
            extra = ["localhost", "127.0.0.1", *([host] if host else [])]
            hosts = list(dict.fromkeys(hosts + extra))
        env[name] = ",".join(hosts)
