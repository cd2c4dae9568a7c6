"""An agent with a calculator, as in Haystack's documentation: it runs where it is made."""

from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def calculator(expression: Annotated[str, "An expression such as 7 * 6"]) -> str:
    """Compute a product."""
    left, _, right = expression.partition("*")
    return str(float(left) * float(right))


agent = Agent(
    chat_generator=OpenAIChatGenerator(model="gpt-5-mini"),
    tools=[calculator],
    system_prompt="Compute with the calculator.",
)
print(agent.run(messages=[ChatMessage.from_user("What is 7 * 6?")])["last_message"].text)
