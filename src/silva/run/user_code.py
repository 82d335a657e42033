"""The user functions that the options name: checked before anything heavy starts, owned by one pool."""

from __future__ import annotations

import logging
import secrets
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from silva.config import RunConfig
from silva.judge import (
    ADVANTAGE_PARAMS,
    GROUP_RM_PARAMS,
    RM_PARAMS,
    CreditStage,
    CustomAdvantage,
    Decode,
    GroupCredit,
    Rewards,
    UserCodeError,
    UserFunction,
    UserFunctionPool,
)
from silva.run.settings import credit_of
from silva.train.custom_tis import TIS_PARAMS, CustomTis
from silva.types import ConfigError, OptionsView

log = logging.getLogger("silva")

USER_CODE_LOG = "user_code.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCode:
    """Functions by their use; None where the options name none."""

    reward: UserFunction | None = None
    """Gives rewards, to each sample or with --group-rm to a group; None without --custom-rm-path."""
    advantage: UserFunction | None = None
    """Gives credit to the contexts of a group; None without --agentic-custom-advantage-path."""
    advantage_takes_group: bool = False
    """Whether the advantage function has a second parameter, for the group."""
    tis: UserFunction | None = None
    """Gives the TIS weights of a sequence; None without --custom-tis-function-path, or where nothing trains."""


async def open_user_code(
    config: RunConfig, run_dir: Path, run_id: str, stack: AsyncExitStack, *, trains: bool = False
) -> UserCode:
    """Load the functions that the options name; those that only an update needs where the run `trains`.

    Raises ConfigError for a function that cannot work. Processes of user code carry a marker of this process alone, so
    that another run in the same folder is not touched.
    """
    tis_path = config.custom_tis_function_path if trains else None
    if config.custom_rm_path is None and not config.has_custom_advantage and tis_path is None:
        return UserCode()
    pool = UserFunctionPool(
        log_path=run_dir / USER_CODE_LOG,
        marker=f"{run_id}-code-{secrets.token_hex(4)}",
        max_concurrency=config.reward_max_concurrency,
        timeout_s=config.reward_timeout_s,
    )
    await stack.enter_async_context(pool)
    reward = advantage = tis = None
    takes_group = False
    if config.custom_rm_path is not None:
        params = GROUP_RM_PARAMS if config.group_rm else RM_PARAMS
        reward = await pool.check(config.custom_rm_path, "--custom-rm-path", params)
    if config.agentic_custom_advantage_path is not None:
        advantage, takes_group = await _check_advantage(pool, config.agentic_custom_advantage_path)
    if tis_path is not None:
        tis = await pool.check(tis_path, "--custom-tis-function-path", TIS_PARAMS)
    if reward is not None and advantage is not None and not config.group_rm:
        log.warning(
            "--custom-rm-path %s is not called: --agentic-custom-advantage-path gives the credit (with --group-rm it "
            "would still give rewards)",
            config.custom_rm_path,
        )
    return UserCode(reward=reward, advantage=advantage, advantage_takes_group=takes_group, tis=tis)


async def _check_advantage(pool: UserFunctionPool, path: str) -> tuple[UserFunction, bool]:
    """The function, and whether it needs the group beside the metadata. One that can do without is called without."""
    flag = "--agentic-custom-advantage-path"
    try:
        return await pool.check(path, flag, ADVANTAGE_PARAMS[:1]), False
    except ConfigError as error:
        try:
            return await pool.check(path, flag, ADVANTAGE_PARAMS), True
        except ConfigError:
            raise error from None


def build_credit(config: RunConfig, user_code: UserCode) -> CreditStage:
    """What gives the contexts of training groups their credit before the groups count."""
    if user_code.advantage is None:
        return GroupCredit(
            credit_of=credit_of(config),
            share=config.agentic_credit or "shared",
            shared_prefix=config.agentic_shared_prefix,
        )
    return CustomAdvantage(
        user_code.advantage,
        takes_group=user_code.advantage_takes_group,
        failed=UserCodeError,
        shared_prefix=config.agentic_shared_prefix,
        path=config.agentic_custom_advantage_path,
    )


def build_custom_tis(config: RunConfig, user_code: UserCode) -> CustomTis | None:
    """Token weights by a user function; None where the options name none."""
    if user_code.tis is None:
        return None
    options = OptionsView(asdict(config))
    return CustomTis(user_code.tis, options=options, failed=UserCodeError, path=user_code.tis.path)


def build_rewards(config: RunConfig, user_code: UserCode, decode: Decode) -> Rewards:
    """The Reward stage under the options."""
    function = None if config.has_custom_advantage and not config.group_rm else user_code.reward
    return Rewards(config, function=function, decode=decode)
