"""A smolagents agent that calls tools."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


model = OpenAIServerModel(model_id="rl-model", api_base=os.environ["BASE_URL"], api_key=os.environ["KEY"])
answer = ToolCallingAgent(tools=[add], model=model, max_steps=5).run(os.environ["TASK"])
print(answer)
assert answer
