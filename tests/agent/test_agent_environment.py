"""What reaches the agent's environment, and what does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silva.agent import environment
from silva.agent.environment import agent_environment, looks_secret, parse_agent_env, withheld_names
from silva.agent.files import session_files
from silva.types.errors import ConfigError

CONTRACT = {
    "RELAX_INPUT_JSON": "/runs/r/sessions/s1/input.json",
    "RELAX_OUTPUT_JSON": "/runs/r/sessions/s1/output.json",
    "RELAX_SESSION_IO_DIR": "/runs/r/sessions/s1/io",
    "RELAX_BASE_URL": "http://127.0.0.1:8123/agentic_api",
    "RELAX_SESSION_ID": "s1",
    "RELAX_ROLLOUT_MODE": "train",
    "RELAX_GROUP_ID": "g1",
    "SILVA_RUN_ID": "run-1",
}


def make(base: dict[str, str], **options) -> dict[str, str]:
    return agent_environment(
        files=session_files(Path("/runs/r"), "s1"),
        base_url="http://127.0.0.1:8123/agentic_api",
        session_id="s1",
        mode="train",
        group_id="g1",
        run_id="run-1",
        base=base,
        **options,
    )


def test_the_contract_is_complete_and_wins_over_what_is_inherited():
    env = make({"RELAX_SESSION_ID": "outer", "RELAX_OTHER": "outer", "SILVA_RUN_ID": "outer", "PATH": "/bin"})
    here = str(Path(sys.executable).parent)
    assert env == {**CONTRACT, "PATH": f"{here}:/bin"}


def test_the_folder_of_the_interpreter_stands_first_and_once():
    here = str(Path(sys.executable).parent)
    assert make({"PATH": f"/usr/bin:{here}:/bin"})["PATH"] == f"{here}:/usr/bin:/bin"
    assert make({})["PATH"].startswith(f"{here}:")
    assert make({"PATH": "/bin"}, agent_env={"PATH": "/mine"})["PATH"] == "/mine"


SECRETS = [
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "PGPASSWORD",
    "MYSQL_PWD",
    "GITHUB_PAT",
    "SSH_AUTH_SOCK",
    "my_secret",
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_BASE_URL",
]
PLAIN = ["TOKENIZERS_PARALLELISM", "PYTHONPATH", "PWD", "OLDPWD", "AWS_REGION", "KEYBOARD", "XAUTHORITY", "VIRTUAL_ENV"]


def test_secrets_and_model_services_are_withheld_and_listed():
    base = dict.fromkeys([*SECRETS, *PLAIN], "x") | {"DATABASE_URL": "postgres://me:pw@db/x", "RELAX_X": "1"}
    env = make(base)
    assert [name for name in [*SECRETS, "DATABASE_URL", "RELAX_X"] if name in env] == []
    assert [name for name in PLAIN if name not in env] == []
    assert withheld_names(base) == sorted([*SECRETS, "DATABASE_URL", "RELAX_X"])


def test_agent_env_passes_a_withheld_variable_on_purpose():
    assert make({"HF_TOKEN": "mine"}, agent_env={"HF_TOKEN": "agents"})["HF_TOKEN"] == "agents"


def test_a_cleared_environment_keeps_what_a_program_needs():
    needed = {"HOME": "/h", "LANG": "C", "LC_ALL": "C", "TMPDIR": "/t", "TERM": "xterm", "USER": "u", "SHELL": "/s"}
    env = make({**needed, "PATH": "/bin", "EDITOR": "ed", "PYTHONPATH": "/p"}, env_clear=True, agent_env={"A": "1"})
    here = str(Path(sys.executable).parent)
    assert env == {**CONTRACT, **needed, "PATH": f"{here}:/bin", "A": "1"}


def test_a_proxy_does_not_stand_between_agent_and_gateway():
    base = {"http_proxy": "http://u:p@proxy:1", "no_proxy": "corp"}
    env = make(base)
    assert env["http_proxy"] == base["http_proxy"]
    assert env["no_proxy"] == "corp,localhost,127.0.0.1"
    assert env["NO_PROXY"] == "localhost,127.0.0.1"
    assert make(base, agent_env={"no_proxy": "mine"})["no_proxy"] == "mine"
    assert "no_proxy" not in make({})


def test_numeric_settings_of_ours_do_not_leak_but_the_users_do(tmp_path):
    code = (
        "import os; os.environ['OMP_WAIT_POLICY'] = 'passive'; os.environ['OMP_NUM_THREADS'] = '1';"
        "os.environ['LATER'] = 'kept'; from silva.agent.environment import trainer_environment as t;"
        "e = t(); print(e.get('OMP_WAIT_POLICY'), e.get('OMP_NUM_THREADS'), e['LATER'])"
    )
    root = str(Path(environment.__file__).parents[2])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": root, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "None 3 kept\n"


def test_agent_env_items():
    assert parse_agent_env(["A=1", "B=", "C=x=y z", "_d1=ü"]) == {"A": "1", "B": "", "C": "x=y z", "_d1": "ü"}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (["FOO"], "'FOO' has no '='"),
        (["=x"], "'' is no variable name"),
        (["1A=x"], "'1A' is no variable name"),
        (["A B=x"], "'A B' is no variable name"),
        (["A\n=x"], "is no variable name"),
        (["RELAX_X=1"], "RELAX_X: this name is reserved"),
        (["SILVA_RUN_ID=1"], "SILVA_RUN_ID: this name is reserved"),
        (["A=1", "A=2"], "gives A twice, as '1' and '2'"),
        (["A=x\0y"], "NUL"),
    ],
)
def test_agent_env_errors_name_the_item(items, text):
    with pytest.raises(ConfigError, match=text):
        parse_agent_env(items)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_agent_env_yields_what_the_system_accepts_or_a_config_error(items):
    try:
        env = parse_agent_env(items)
    except ConfigError:
        return
    assert len(env) == len(items)
    assert all(name and "=" not in name and "\0" not in name + value for name, value in env.items())
    assert not any(name.startswith("RELAX_") or name == "SILVA_RUN_ID" for name in env)


@settings(deadline=None)
@given(st.text(alphabet="ABC_", max_size=8), st.sampled_from(["KEY", "TOKEN", "SECRET", "PASSWORD"]), st.booleans())
def test_a_name_that_ends_like_a_secret_is_one_in_any_case(start, end, lower):
    name = start + end
    assert looks_secret(name.lower() if lower else name)
