"""openai-agents: Runner.run on the Responses API."""

import asyncio

import shell
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool(name_override="shell", description_override=shell.DESCRIPTION)
def run(command: str) -> str:
    return shell.run_shell(command)


async def main():
    set_tracing_disabled(True)  # traces go to another host
    client = AsyncOpenAI(base_url=shell.BASE_URL + "/v1", api_key=shell.API_KEY, timeout=shell.TIMEOUT_S)
    agent = Agent(
        name="shell",
        instructions=shell.SYSTEM,
        tools=[run],
        model=OpenAIResponsesModel(model="policy", openai_client=client),
        model_settings=ModelSettings(store=False),
    )
    result = await Runner.run(agent, shell.PROMPT, max_turns=shell.MAX_TURNS)
    shell.finish(str(result.final_output))


asyncio.run(main())
