"""A small agent with one tool, written with the plain `openai` client. It knows nothing of Leyden.

It asks the model for a calculator call, runs the calculator, gives the result back, and takes the model's next answer.
What happened goes to `answer.json` in the working directory.
"""

import ast
import json
import operator
import os
import re

from openai import OpenAI

QUESTION = os.environ["QUESTION"]
MODEL = os.environ.get("MODEL", "policy")

PROMPT = [
    {"role": "system", "content": "Call the calculator, then give the result."},
    {"role": "user", "content": "What is 3 times 4?"},
    {"role": "assistant", "content": "<calc>3*4</calc>"},
    {"role": "user", "content": "Result: 12"},
    {"role": "assistant", "content": "12"},
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """Value of an expression of whole numbers with + - *. Raises ValueError for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers with + - *")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as e:
        raise ValueError("not an expression") from e


def main() -> None:
    client = OpenAI()
    messages = [*PROMPT, {"role": "user", "content": QUESTION}]
    record = {"question": QUESTION, "expression": None, "result": None, "answer": None}

    def ask() -> str:
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
        return reply.choices[0].message.content or ""

    first = ask()
    if call := re.search(r"<calc>(.{1,40}?)</calc>", first):
        record["expression"] = call.group(1)
        try:
            record["result"] = calculate(call.group(1))
            tool = f"Result: {record['result']}"
        except ValueError as e:
            tool = f"Error: {e}"
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": tool}]
        record["answer"] = ask().strip()
    with open("answer.json", "w") as f:
        json.dump(record, f)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
