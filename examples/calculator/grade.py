"""Grades one attempt from what the agent left in the workspace: 1.0 for the right answer after a calculator call that
worked, 0.2 for such a call alone, else 0. The last line printed is the reward."""

import json
import os

with open(os.environ["LEYDEN_TASK_FILE"]) as f:
    task = json.load(f)
try:
    with open("answer.json") as f:
        record = json.load(f)
except FileNotFoundError:
    record = {}

called = record.get("result") is not None
right = called and record.get("answer") == str(task["answer"])
print(1.0 if right else 0.2 if called else 0.0)
