"""``create_agent`` with memory, as in LangChain's documentation ("Add short-term memory")."""

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver


def get_weather(city: str) -> str:
    """Get weather for a given city."""
    return f"It's always sunny in {city}!"


agent = create_agent("openai:gpt-5-mini", tools=[get_weather], checkpointer=InMemorySaver())
