"""The base class of a domain, and objects that are domains without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groundwire.domains import DataError, Domain, TaskData, as_domain, database_folders, load_split
from groundwire.domains.text_to_sql.golds import with_gold_trust
from groundwire.tools.plugins import PluginError
from groundwire.tools.sql.answers import SQL

TASKS = [{"id": "1", "question": "?", "db": "/data/one.sqlite"}]


class Plain:
    """As the documentation writes a domain of a plug-in."""

    name, default_reward, form = "plain", "spider_exec_match", "sql"

    def load(self, data_dir: str | None = None) -> TaskData:
        return TaskData(train=TASKS, validation=TASKS, source="plain")

    def database(self, task: Any) -> str:
        return str(task["db"])


def test_an_object_without_the_base_class_is_a_domain_with_the_defaults(tmp_path: Path) -> None:
    domain = as_domain(Plain())
    assert (domain.name, domain.default_reward, domain.answers, domain.breakdowns) == (
        "plain",
        "spider_exec_match",
        SQL,
        {},
    )
    assert load_split(domain, "train").validation == TASKS
    assert database_folders(domain) == [Path("/data/one.sqlite")]
    with pytest.raises(DataError, match="'plain' has no split 'test'; it has train and validation"):
        load_split(domain, "test")
    with pytest.raises(DataError, match="'plain' has nothing to prepare"):
        domain.prepare(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="gold_trust is for gold queries, and plain has none"):
        with_gold_trust(domain.load(), tmp_path / "suspects.json")


def test_a_misspelt_hook_is_an_error_and_an_attribute_of_its_own_is_not() -> None:
    class Misspelt(Plain):
        def load_splits(self, split: str, data_dir: str | None = None) -> TaskData:
            return self.load()

    class Derived(Domain):
        name = "derived"
        breakdown = {"level": {"a": "A"}}

    class Own(Plain):
        databases, levels = ("one.sqlite",), ("easy",)

    with pytest.raises(PluginError, match="'plain' has 'load_splits', which is no hook: is it 'load_split'"):
        as_domain(Misspelt())
    with pytest.raises(PluginError, match="'derived' has 'breakdown', which is no hook: is it 'breakdowns'"):
        as_domain(Derived())
    assert as_domain(Own()).name == "plain"


def test_a_form_of_answers_that_is_not_known_is_an_error() -> None:
    class Odd(Plain):
        form = "SQL"

    with pytest.raises(PluginError, match="form 'SQL'; it is one of prose, sql"):
        as_domain(Odd())
