"""A chat agent with a tool, as in CAMEL's documentation."""

from camel.agents import ChatAgent
from camel.toolkits import FunctionTool


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    return a * b


agent = ChatAgent("You are a helpful assistant.", model="gpt-4o-mini", tools=[FunctionTool(multiply)])
