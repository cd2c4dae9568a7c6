"""What was sampled against what training gets: tokens lost, masked wrongly or invented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing.trajectories import common_tokens, token_bytes
from groundwire.tools.errors import CommandError

__all__ = ["ExportedRow", "SampledReply", "Tokens", "compare", "read_row"]


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """A reply as the policy sampled it."""

    conversation: str
    prompt_ids: list[int]
    response_ids: list[int]
    message: str = ""
    """Its :func:`groundwire.adapters.tracing.scripted_server.message_key`."""

    @property
    def context(self) -> list[int]:
        """Prompt and reply."""
        return self.prompt_ids + self.response_ids


@dataclass(frozen=True)
class ExportedRow:
    """What is trained on: ``loss_mask`` has a 1 for each of ``response_ids`` that gets a loss."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Counts of one conversation.

    ``lost``: sampled, and in no row's response after the tokens that they were sampled after. ``masked_wrongly``: there
    and not trained, trained more than once, or trained though the policy read them. ``invented``: in a row, at a place
    where the policy neither read nor sampled them.
    """

    lost: int = 0
    masked_wrongly: int = 0
    invented: int = 0


def read_row(fields: Mapping[str, Any]) -> ExportedRow:
    """The row with these fields; ``loss_mask`` may be missing if all is trained. Raises :class:`CommandError`."""
    try:
        prompt, response = list(fields["prompt_ids"]), list(fields["response_ids"])
        mask = list(fields.get("loss_mask") or [1] * len(response))
    except (LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"no training row: {fields!r:.80}; write a JSON object with prompt_ids, response_ids and loss_mask"
        ) from error
    if len(mask) != len(response):
        raise CommandError(f"a row has {len(response)} response_ids and a loss_mask of {len(mask)}: give one for each")
    return ExportedRow(prompt, response, mask)


def compare(sampled: Sequence[SampledReply], rows: Iterable[ExportedRow]) -> dict[str, Tokens]:
    """The counts of each conversation. A row belongs to the one whose context it shares most of.

    No two replies may have the same prompt and first token.
    """
    trained, invented, wrong, lost = Counter[tuple[int, int]](), Counter[str](), Counter[str](), Counter[str]()
    in_a_row: set[tuple[int, int]] = set()
    for row in rows if sampled else ():
        ids, mask = row.prompt_ids + row.response_ids, [0] * len(row.prompt_ids) + row.loss_mask
        row_bytes = token_bytes(ids)
        shared = [common_tokens(row_bytes, token_bytes(reply.context)) for reply in sampled]
        known = max(shared)
        conversation = sampled[shared.index(known)].conversation
        places: dict[int, tuple[int, int]] = {}  # of the sampled tokens: number of the reply, index in it
        for number, (reply, length) in enumerate(zip(sampled, shared, strict=True)):
            start = len(reply.prompt_ids)
            places |= {start + i: (number, i) for i in range(length - start)}
        in_a_row.update(place for position, place in places.items() if position >= len(row.prompt_ids))
        trained.update(place for position, place in places.items() if mask[position])
        invented[conversation] += len(ids) - known
        wrong[conversation] += sum(mask[position] for position in range(known) if position not in places)
    for number, reply in enumerate(sampled):
        found = [i for i in range(len(reply.response_ids)) if (number, i) in in_a_row]
        lost[reply.conversation] += len(reply.response_ids) - len(found)
        wrong[reply.conversation] += sum(trained[number, i] != 1 for i in found)
    return {
        name: Tokens(lost=lost[name], masked_wrongly=wrong[name], invented=invented[name])
        for name in dict.fromkeys(reply.conversation for reply in sampled)
    }
