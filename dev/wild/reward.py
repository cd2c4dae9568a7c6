"""The reward of the agents in the wild: the expected text is in the answer, and a little for the length."""


def contains(task, answer):
    """1 if the expected text is in the answer, and up to 0.2 for its length, so that groups differ."""
    return float(task["expected"].lower() in answer.lower()) + 0.2 * min(1.0, len(answer) / 300)
