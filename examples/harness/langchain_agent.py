"""LangChain on LangGraph: create_agent with ChatOpenAI on Chat Completions."""

import shell
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool("shell", description=shell.DESCRIPTION)
def run(command: str) -> str:
    return shell.run_shell(command)


def main():
    model = ChatOpenAI(
        model="policy",
        base_url=shell.BASE_URL + "/v1",
        api_key=shell.API_KEY,
        timeout=shell.TIMEOUT_S,
        use_responses_api=False,
    )
    agent = create_agent(model, [run], system_prompt=shell.SYSTEM)
    state = agent.invoke(
        {"messages": [{"role": "user", "content": shell.PROMPT}]}, {"recursion_limit": 2 * shell.MAX_TURNS + 1}
    )
    shell.finish(state["messages"][-1].text)


main()
