"""What a larger starter reads of real databases: golds in one spelling, names that change together, databases apart."""

from __future__ import annotations

import itertools
import random
import re
import sqlite3
from types import SimpleNamespace

import pytest

from groundwire import domains
from groundwire.rewards.spider.execution_match import execution_match
from groundwire.tools.schema import table_info
from groundwire.train.pretrain import larger
from groundwire.train.pretrain.corpus import Stage
from groundwire.train.pretrain.golds import for_pretraining, in_pretraining, tidied
from groundwire.train.pretrain.larger import SIZES, pretrain_larger
from groundwire.train.pretrain.plain import plain_question
from groundwire.train.pretrain.real import made_up_dialogues, real_dialogues
from groundwire.train.pretrain.renaming import names
from groundwire.train.pretrain.tokenizer import train_tokenizer

SCHEMA = "CREATE TABLE Singer ( Singer_ID int , Song_Name text , count int )\nCREATE TABLE stadium ( Id int )"


@pytest.fixture(scope="module")
def tasks():
    return domains.get("spider").load().train[:400]


@pytest.mark.parametrize(
    ("written", "tidy"),
    [
        ('select song_name , Count(*) from SINGER  where Song_name  =  "O\'Neil" ;',
         "SELECT Song_Name, count(*) FROM Singer WHERE Song_Name = 'O''Neil'"),
        ("SELECT t1.singer_id FROM singer AS t1 JOIN Stadium AS T2 ON t1.SINGER_ID = T2.id",
         "SELECT T1.Singer_ID FROM Singer AS T1 JOIN stadium AS T2 ON T1.Singer_ID = T2.Id"),
        ("SELECT id FROM stadium WHERE id NOT IN ( SELECT max(singer_id) FROM singer ) AND id >= 1.5",
         "SELECT Id FROM stadium WHERE Id NOT IN (SELECT max(Singer_ID) FROM Singer) AND Id >= 1.5"),
        ('SELECT "song_name" FROM singer', 'SELECT "song_name" FROM Singer'),
    ],
)  # fmt: skip
def test_golds_get_one_spelling(written: str, tidy: str) -> None:
    assert tidied(written, SCHEMA) == tidy


def test_a_tidied_gold_returns_what_the_gold_did(tasks) -> None:
    chosen = for_pretraining(tasks)
    golds = {task["id"]: task["query"] for task in tasks}
    assert all(execution_match(task["query"], golds[task["id"]], task["db_path"]).score for task in chosen)


def test_some_databases_are_left_to_reinforcement_learning(tasks) -> None:
    known = {task["db_path"] for task in for_pretraining(tasks)}
    left = {task["db_path"] for task in tasks if not in_pretraining(task)}
    assert known
    assert left
    assert not known & left


def test_names_change_together_so_that_the_query_still_runs(tasks) -> None:
    """On empty tables of the schema that is shown: what does not exist there was not renamed with the rest."""
    chosen = for_pretraining(tasks)
    renamed = 0
    for item in itertools.islice(real_dialogues(random.Random(5), chosen, names(tasks)), 60):
        schema = item.prefix.partition("only these tables:\n")[2].partition("<|im_end|>")[0]
        connection = sqlite3.connect(":memory:")
        connection.executescript(schema.replace("\n", ";\n"))
        renamed += schema not in {
            table_info(task["db_path"], example_values=0, show_keys=False).text for task in chosen
        }
        replies = [reply for dialogue in item.dialogues for reply, learned in dialogue if learned]
        queries = [sql for reply in replies for sql in re.findall(r"```sql\n(.*?)\n```", reply, re.DOTALL)]
        assert len(queries) >= 3
        for sql in queries:
            connection.execute(sql)
        connection.close()
    assert renamed > 30


def test_most_queries_to_rewrite_are_nearly_right_and_their_errors_name_what_there_is(tasks) -> None:
    chosen = for_pretraining(tasks)
    rewrites, listed, verdicts = 0, 0, set()
    for item in itertools.islice(real_dialogues(random.Random(6), chosen, names(tasks)), 60):
        for (asked, _), (reply, _) in item.dialogues:
            shown = re.search(r"```sql\n(.*?)\n```\nResult: (.*)", asked)
            if shown and "Write a better query." in asked:
                rewrites += 1
                listed += "Error: no such" in shown[2] and re.search(r"Tables: |Columns of ", shown[2]) is not None
                assert shown[1] not in reply.split("\n")
            elif shown:
                verdicts.add(reply.removesuffix("<|im_end|>"))
    assert verdicts == {"CORRECT", "INCORRECT"}
    assert rewrites > 80
    assert listed > 0.3 * rewrites


def test_folded_case_shares_ids_and_loses_nothing() -> None:
    tokenizer = train_tokenizer(["the country code"] * 30, words=["country", "code"], min_count=2, fold_case=True)
    (country,) = tokenizer(" country")["input_ids"]
    for text in (
        " Country of",
        "SELECT T1.Country",
        "CountryCode",
        " 'Country'",
        "Country_Code",
        "a CountryCode , MPG",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert country in tokenizer("T1.Country")["input_ids"]
    assert country in tokenizer(" the_Country")["input_ids"]


def test_a_larger_starter_is_trained(tasks, monkeypatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", {"width": 32, "layers": 1, "heads": 2, "intermediate": 32})
    # A second a step, however fast this machine is.
    monkeypatch.setattr(larger, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    losses: list[float] = []
    model, tokenizer = pretrain_larger(
        "tiny",
        minutes=0.5,
        tasks=for_pretraining(tasks),
        names=names(tasks),
        batch=4,
        workers=1,
        device="cpu",
        on_step=lambda step: losses.append(step.loss),
    )
    assert len(losses) == 29  # the clock is read once more, when it starts
    assert model.config.vocab_size == len(tokenizer)
    assert sum(losses[-5:]) < sum(losses[:5])


def test_plain_questions_run_on_the_schema_that_they_are_made_of(tasks) -> None:
    rng, forms = random.Random(3), set()
    for path in sorted({str(task["db_path"]) for task in tasks}):
        schema = table_info(path, example_values=0, show_keys=False).text
        connection = sqlite3.connect(":memory:")
        connection.executescript(schema.replace("\n", ";\n"))
        for _ in range(30):
            question, sql = plain_question(rng, schema)
            connection.execute(sql)
            assert question[-1] in "?."
            forms.add(re.sub(r"\b(?![A-Z]+\b)\w+\b", "x", sql))
        connection.close()
    assert len(forms) > 20


@pytest.mark.parametrize("text", ["", 'CREATE TABLE "order" ( "the id" int )'])
def test_no_plain_question_without_a_plain_name(text: str) -> None:
    assert plain_question(random.Random(0), text) is None


def test_generated_databases_are_written_in_many_ways_and_their_queries_run(tasks) -> None:
    written = set()
    items = made_up_dialogues(random.Random(8), Stage(writes=4, checks=1, rewrites=1), names(tasks))
    for item in itertools.islice(items, 40):
        schema = item.prefix.partition("only these tables:\n")[2].partition("<|im_end|>")[0]
        connection = sqlite3.connect(":memory:")
        connection.executescript(schema.replace("\n", ";\n"))
        replies = [reply for dialogue in item.dialogues for reply, learned in dialogue if learned]
        for sql in re.findall(r"```sql\n(.*?)\n```", "\n".join(replies), re.DOTALL):
            connection.execute(sql)
        connection.close()
        (first,) = re.findall(r"CREATE TABLE (\w+)", schema)[:1]
        written.add((first.isupper(), first.islower(), "_" in first))
    assert len(written) >= 4
