"""An agent of the OpenAI Agents SDK: `responses`, `previous` (by previous_response_id) or `chat`, then streamed."""

import asyncio
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def main(way: str) -> None:
    if way == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="calculator", instructions="Use the tool.", model="rl-model", tools=[add])
    more = {"auto_previous_response_id": True} if way == "previous" else {}
    if way == "chat":
        result = Runner.run_streamed(agent, os.environ["TASK"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, os.environ["TASK"], **more)
    print(result.final_output)
    assert result.final_output


asyncio.run(main(sys.argv[1]))
