"""Exercises in copying: words to repeat, pairs to look up, and tools to call, without a database.

A policy that has to copy the names of tools and arguments needs more different ones than agents with databases have.
"""

from __future__ import annotations

import random

from dev.pretrain.other_tools import Style
from dev.pretrain.turns import Dialogues, Segment, reply, system_turn, tool_call, user_turn
from dev.pretrain.wording import choose, noise, paragraph, random_words

__all__ = ["drills", "tool_drills"]

_REQUESTS = (
    "{name}",
    "[Call|Use|Run|Try] {name}[|.| now.]",
    "[Please|Now|Then] [call|use|run] {name}",
    "{about}",
    "{about}",
    "I need {name}: {about}",
)


def drills(rng: random.Random, count: int) -> Dialogues:
    """``count`` dialogues of one kind."""
    return rng.choice((_repeat, _look_up, tool_drills, tool_drills))(rng, count)


def _repeat(rng: random.Random, count: int) -> Dialogues:
    """The reply repeats the user's words."""
    texts = [rng.choice((" ", "_", ", ")).join(random_words(rng, 12)) for _ in range(2 * count)]
    return Dialogues("", [[(user_turn(text), False), reply(text)] for text in texts])


def _look_up(rng: random.Random, count: int) -> Dialogues:
    """The reply is what stands beside the user's words in the system message."""
    separator = rng.choice((": ", " = ", " "))
    pairs = [("_".join(random_words(rng, 3)), "_".join(random_words(rng, 3))) for _ in range(rng.randint(1, 6))]
    prefix = system_turn("\n".join(separator.join(pair) for pair in pairs))
    chosen = rng.choices(pairs, k=2 * count)
    return Dialogues(prefix, [[(user_turn(key), False), reply(value)] for key, value in chosen])


def tool_drills(rng: random.Random, count: int) -> Dialogues:
    """The reply calls the tool that the user names or describes."""
    style = Style.sample(rng)
    tools = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        name = rng.choice(("_", "_", "_", "-")).join(random_words(rng, 3))
        arguments = {"_".join(random_words(rng, 2)): "" for _ in range(rng.choice((0, 1, 1, 1, 2)))}
        about = choose(rng, noise(rng))
        listed = [(argument, "string", "") for argument in arguments]
        tools.append((style.define(rng, name, about, listed, len(listed)), list(arguments)))
    instructions = paragraph(rng, [], rng.choice((0, 1, 1, 2, 4)))
    items: list[list[Segment]] = []
    for _ in range(count):
        definition, names = rng.choice(tools)
        text = choose(rng, rng.choice(_REQUESTS))
        text = text.replace("{name}", definition["name"]).replace("{about}", definition["description"])
        values = {name: " ".join(random_words(rng, 3)) for name in names}
        separator = rng.choice((": ", " = ", " "))
        text = "\n".join([text, *(f"{name}{separator}{value}" for name, value in values.items())])
        items.append([(user_turn(text), False), tool_call(definition["name"], values)])
    return Dialogues(system_turn(instructions, [definition for definition, _ in tools]), items)
