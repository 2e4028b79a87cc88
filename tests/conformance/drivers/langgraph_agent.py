"""A LangGraph agent over chat, Responses or Anthropic Messages; the chat one streams."""

import os
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def model(way: str):
    if way == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="rl-model", base_url=os.environ["ANTHROPIC_BASE"], api_key=os.environ["KEY"])
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="rl-model",
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["KEY"],
        use_responses_api=way == "responses",
        streaming=way == "chat",
    )


bound = model(sys.argv[1]).bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
start = [SystemMessage("Use the tool."), HumanMessage(os.environ["TASK"])]
last = graph.compile().invoke({"messages": start})["messages"][-1]
print(last.content)
assert last.content
