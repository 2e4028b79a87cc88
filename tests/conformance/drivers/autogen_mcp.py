"""An AutoGen agent with the calculator server over MCP."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams


async def main() -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(
        model="rl-model", base_url=os.environ["BASE_URL"], api_key=os.environ["KEY"], model_info=info
    )
    server = StdioServerParams(command=sys.executable, args=["-m", "mcp_server_calculator"])
    async with McpWorkbench(server) as workbench:
        agent = AssistantAgent("calculator", model_client=client, workbench=workbench, max_tool_iterations=6)
        result = await agent.run(task=os.environ["TASK"])
    print(result.messages[-1].content)
    assert result.messages[-1].content


asyncio.run(main())
