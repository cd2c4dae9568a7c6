"""The same task with the prompt in place of the weights: ``trainer="gepa"`` (``pip install 'groundwire[gepa]'``).

    OPENAI_API_KEY=none python prompts.py

A list of prompts stands in for the model that writes new ones. For a real one leave the list out, and name the model:
``reflection_model="openai/gpt-5"``, with its key in OPENAI_API_KEY.
"""

import asyncio
import itertools

import openai
from own_task import reward, tasks

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train import fit

PROPOSALS = [
    "Is this good or bad?",
    "Classify the sentence. Possible answers: positive, negative.",
    "Reply with one word: positive or negative.",
    "Classify the sentence. Possible answers: negative, positive.",
]


async def agent(question, endpoint):
    """One word about the sentence, with the instructions of this rollout."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        text = f"{endpoint.prompts['instructions']}\nSentence: {question.text}\nAnswer:"
        messages = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model=endpoint.model, messages=messages, **endpoint.sampling)
        return reply.choices[0].message.content


agent.prompts = {"instructions": "What is the mood?"}  # with these the search begins


async def main():
    """Search, and print the best prompt."""
    proposals = itertools.cycle(PROPOSALS)
    async with ScriptedPolicyServer(lambda _: f"```\n{next(proposals)}\n```") as writer:
        result = await asyncio.to_thread(
            fit,
            agent,
            tasks,
            reward,
            trainer="gepa",
            model="smollm2",
            config="hf",
            reflection_model=f"{writer.model}@{writer.base_url}",
            prompt_budget=150,
            max_tokens=8,
        )
    print(result)


if __name__ == "__main__":
    asyncio.run(main())
