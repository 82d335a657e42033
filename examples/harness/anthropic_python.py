"""anthropic-python: a tool loop on streamed Messages."""

from anthropic import Anthropic
from shell import API_KEY, BASE_URL, DESCRIPTION, MAX_TURNS, PARAMETERS, PROMPT, SYSTEM, TIMEOUT_S, finish, run_shell

TOOLS = [{"name": "shell", "description": DESCRIPTION, "input_schema": PARAMETERS}]


def main():
    # The SDK adds /v1/messages itself, so its base URL is the address as it is.
    client = Anthropic(base_url=BASE_URL, api_key=API_KEY, timeout=TIMEOUT_S)
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(MAX_TURNS):
        with client.messages.stream(
            model="policy", max_tokens=32000, system=SYSTEM, messages=messages, tools=TOOLS
        ) as stream:
            reply = stream.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run_shell(call.input["command"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    finish("".join(block.text for block in reply.content if block.type == "text"))


main()
