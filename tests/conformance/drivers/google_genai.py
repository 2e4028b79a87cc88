"""An agent of Google's Gen AI SDK, which calls functions by itself; streams or doesn't."""

import os
import sys

from google import genai
from google.genai import types


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return f"{a + b} é"


options = types.HttpOptions(base_url=os.environ["GEMINI_BASE"])
client = genai.Client(api_key=os.environ["KEY"], http_options=options)
asked = types.GenerateContentConfig(
    system_instruction="Use the tool.",
    tools=[add],
    thinking_config=types.ThinkingConfig(include_thoughts=True),
)
chat = client.chats.create(model="rl-model", config=asked)
if sys.argv[1] == "stream":
    text = "".join(piece.text or "" for piece in chat.send_message_stream(os.environ["TASK"]))
else:
    text = chat.send_message(os.environ["TASK"]).text
counted = client.models.count_tokens(model="rl-model", contents="one two three").total_tokens
print(text, counted, [m.name for m in client.models.list()])
assert text and counted
