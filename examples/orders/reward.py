"""The reward: the order number, and nothing else."""


def reward(task: dict[str, str], answer: str) -> float:
    """1 for the right number alone, 0 for anything else."""
    return float(answer.strip().strip(".") == task["expected"])
