"""openai-python: a tool loop on Chat Completions."""

import json

from openai import OpenAI
from shell import API_KEY, BASE_URL, DESCRIPTION, MAX_TURNS, PARAMETERS, PROMPT, SYSTEM, TIMEOUT_S, finish, run_shell

TOOLS = [{"type": "function", "function": {"name": "shell", "description": DESCRIPTION, "parameters": PARAMETERS}}]


def main():
    client = OpenAI(base_url=BASE_URL + "/v1", api_key=API_KEY, timeout=TIMEOUT_S)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_unset=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            output = run_shell(json.loads(call.function.arguments)["command"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    finish(message.content or "")


main()
