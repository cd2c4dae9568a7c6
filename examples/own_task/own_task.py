"""Train a small language model to name the mood of a sentence: a task that is not SQL."""

import itertools
import random

import openai

from groundwire.train import fit

client = openai.AsyncOpenAI()


async def agent(task):
    """One word about the sentence."""
    messages = [{"role": "user", "content": f"{task.question}\nReply with one word: positive or negative."}]
    reply = await client.chat.completions.create(model="gpt-5-mini", messages=messages)
    return reply.choices[0].message.content


def reward(task, answer):
    """1 if the answer begins with the mood."""
    return float(answer.lower().startswith(task["answer"]))


things = ["The film", "This phone", "The food", "My room", "The concert", "Her new book"]
words = {
    "positive": ["wonderful", "a joy", "excellent", "better than expected"],
    "negative": ["awful", "a waste of money", "broken", "worse than expected"],
}
tasks = [
    {"question": f"{thing} was {word}.", "answer": label}
    for thing, (label, some) in itertools.product(things, words.items())
    for word in some
]
random.Random(0).shuffle(tasks)

if __name__ == "__main__":
    result = fit(
        agent,
        tasks,
        reward,
        model="smollm2",
        config="hf",
        learning_rate=5e-5,
        steps=12,
        tasks_per_step=6,
        group_size=8,
        max_tokens=8,
        val_every=0,
    )
    print(result)
