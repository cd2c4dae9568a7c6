"""Whether a model suits the agent and the tasks, from the files in its folder: no weight is read."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from groundwire import adapters, domains
from groundwire.tools.errors import BrokenResourceError, ShortenedWarning, SkippedWarning
from groundwire.tools.text import first_of
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.chat.template import TemplateLimitError, TemplateRefusedError, check_template
from groundwire.train.policy.pretrained.locate import read_chat_templates, read_context_length
from groundwire.train.rollouts.agent_view import AgentView


def check_model(
    config: RunConfig, folder: Path, backend: adapters.Backend, view: AgentView, tasks: Sequence[domains.Task]
) -> list[str]:
    """Notes for the user about the model in ``folder``.

    Raises :class:`ConfigError` if no rollout of ``tasks`` could succeed with it. Only a backend with ``first_prompt``
    has prompts that are known before it runs.
    """
    if not (folder / "tokenizer.json").is_file():
        return []  # a tokenizer of another kind, with a template of its own
    first_prompt, (templates, variables) = backend.first_prompt, read_chat_templates(folder)
    template = "\n".join(filter(None, templates.values()))
    if not template and first_prompt is not None:
        raise ConfigError(f"{config.model} has no chat template: use an instruct model, or set its chat_template")
    try:
        if templates.get("default"):
            check_template(templates["default"], variables)
    except (TemplateRefusedError, TemplateLimitError) as error:
        raise ConfigError(
            f"the chat template of {config.model} cannot write one message of a user: {error}; correct it, or use "
            "another model"
        ) from error
    if template and "tools" not in template and backend.calls_tools:
        raise ConfigError(
            f"the chat template of {config.model} has no tools, so the model would never see the agent's: use a model "
            "whose template has tools, or an agent without them, such as --backend langgraph"
        )
    limit = min(config.max_model_len, read_context_length(folder) or config.max_model_len)
    if not template:  # the agent may have plain prompts only
        return [f"model: {config.model} has no chat template, so chats fail; only completions of plain prompts work"]
    if first_prompt is None or not tasks:
        return []
    with warnings.catch_warnings(record=True) as caught:  # one note in place of a warning for each database
        for category in (ShortenedWarning, SkippedWarning):
            warnings.simplefilter("always", category)
        lengths = _long_prompts(config, view, tasks, first_prompt, folder / "tokenizer.json", limit)
    notes = []
    count = len(set(map(view.domain.database, tasks)))
    skipped = [str(warning.message) for warning in caught if issubclass(warning.category, SkippedWarning)]
    if skipped:
        notes.append(
            f"schemas: parts of {len(skipped):,} of {count:,} databases cannot be read: {first_of(skipped, 3)}"
        )
    if cut := sum(issubclass(warning.category, ShortenedWarning) for warning in caught):
        notes.append(
            f"schemas: the prompts leave out tables of {cut:,} of {count:,} databases, and questions about them cannot "
            "be answered; raise the agent's option table_info_truncate, or lower example_values"
        )
    remedy = "raise max_model_len" if limit == config.max_model_len else "use a model with a longer context"
    remedy += ", or lower the agent's option table_info_truncate"
    if len(lengths) == len(tasks):
        raise ConfigError(
            f"the prompts are longer than the model's context: {min(lengths)} to {max(lengths)} tokens, and it has "
            f"{limit}; {remedy}"
        )
    if lengths:
        notes.append(
            f"prompts: {len(lengths):,} of {len(tasks):,} tasks have a prompt of {limit} tokens or more (at most "
            f"{max(lengths)}), so their rollouts fail; {remedy}"
        )
    return notes


def _long_prompts(
    config: RunConfig,
    view: AgentView,
    tasks: Sequence[domains.Task],
    first_prompt: Callable[[adapters.Question, Mapping[str, str]], str],
    file: Path,
    limit: int,
) -> list[int]:
    """The least number of tokens of each first prompt that leaves no token of ``limit`` for a reply.

    A prompt is mostly its database's schema, so where the one with the longest question is short enough, all are.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # its only type
        raise ConfigError(f"{file} holds no tokenizer: {error}") from error

    def count(task: domains.Task) -> int:
        try:
            text = first_prompt(view.question(task, view.domain.database(task)), config.prompts)
        except BrokenResourceError:
            return 0  # its rollouts say so
        return len(tokenizer.encode(text, add_special_tokens=False))

    by_database = defaultdict[str, list[domains.Task]](list)
    for task in tasks:
        by_database[view.domain.database(task)].append(task)
    groups = by_database.values()
    long = [group for group in groups if count(max(group, key=lambda task: len(task["question"]))) >= limit]
    return [length for group in long for task in group if (length := count(task)) >= limit]
