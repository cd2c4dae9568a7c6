"""What the main function of LlamaIndex' concierge gives its workflow."""


def start(task):
    """The input of the workflow."""
    from llama_index.llms.openai import OpenAI
    from main import get_agent_configs, get_initial_state

    return {
        "user_msg": task.question,
        "agent_configs": get_agent_configs(),
        "llm": OpenAI(model="gpt-4o", temperature=0.4),
        "chat_history": [],
        "initial_state": get_initial_state(),
    }
