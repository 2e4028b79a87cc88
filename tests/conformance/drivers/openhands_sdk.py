"""An OpenHands agent with its terminal."""

import os
import tempfile

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(
    model="openai/rl-model", base_url=os.environ["BASE_URL"], api_key=SecretStr(os.environ["KEY"]), usage_id="agent"
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
with tempfile.TemporaryDirectory() as workspace:
    conversation = Conversation(agent=agent, workspace=workspace)
    conversation.send_message(os.environ["TASK"])
    conversation.run()
    print(conversation.state.execution_status)
    assert "finished" in str(conversation.state.execution_status).lower()
