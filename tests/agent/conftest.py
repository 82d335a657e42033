import uuid

import pytest
from marked import marked

from silva.agent.agent_runner import AgentRunner


@pytest.fixture
async def runner():
    """A runner with short waits; nothing of its run may be left after the test."""
    runner = AgentRunner(run_id=f"run-{uuid.uuid4().hex[:12]}", grace_s=0.4, sweep_s=0.05)
    yield runner
    await runner.close()
    assert marked(runner.run_id) == []
