"""Finds the order number in a customer's message."""

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

PROMPT = "You read messages of customers. Find the order number, and answer with it alone."


class Message(TypedDict):
    question: str
    answer: str


model = ChatOpenAI(model="gpt-4o-mini")


def find(message: Message) -> dict[str, str]:
    reply = model.invoke([("system", PROMPT), ("user", f"Message: {message['question']}\nOrder number:")])
    return {"answer": str(reply.content)}


graph = StateGraph(Message).add_node("find", find).add_edge(START, "find").add_edge("find", END).compile()
