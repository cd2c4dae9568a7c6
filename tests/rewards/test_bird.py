"""The domain BIRD reads the official layout, and its metrics are those of the official evaluator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from bird_folder import CLINIC, DEV, QUERIES, TRAIN, make_bird
from programs import ROOT
from spider_folder import make_database
from typer.testing import CliRunner

from groundwire import domains, rewards
from groundwire.domains import DataError
from groundwire.domains.prepare import app
from groundwire.domains.text_to_sql.golds import FAILS, NO_ROWS
from groundwire.rewards import RewardError
from groundwire.rewards.bird import efficiency, efficiency_reward, exec_match, soft_match, time_ratio

bird = domains.get("bird")
VERDICTS = json.loads((ROOT / "tests" / "data" / "bird_verdicts.json").read_text())
GOLD = QUERIES[0]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bird") / "clinic.sqlite"
    make_database(path, CLINIC)
    return str(path)


# -- the official evaluator's verdicts (tests/data/make_bird.py)


def test_the_verdicts_are_of_these_queries() -> None:
    assert VERDICTS["queries"] == QUERIES


@pytest.mark.parametrize(("metric", "match"), [("ex", exec_match), ("soft_f1", soft_match)])
def test_every_verdict_is_the_official_one(metric: str, match: type[exec_match], clinic: str) -> None:
    judged = 0
    for gold, verdicts in zip(QUERIES, VERDICTS[metric], strict=True):
        try:
            ours = [match(predicted, gold, clinic, mode="official") for predicted in QUERIES]
        except RewardError:  # officially each answer to a gold that fails is wrong
            assert not any(verdicts), gold
            continue
        assert ours == pytest.approx(verdicts, abs=1e-9), gold
        judged += len(verdicts)
    assert judged >= 700


def test_every_reward_for_running_times_is_the_official_one() -> None:
    ours = [efficiency_reward(time_ratio(*times)) for times in VERDICTS["times"]]
    assert [*ours, 0] == VERDICTS["rewards"]
    assert set(ours) == {1.25, 1.0, 0.75, 0.5, 0.25}
    assert 100 * fmean(map(math.sqrt, VERDICTS["rewards"])) == pytest.approx(VERDICTS["r_ves"])
    assert time_ratio([2.0, 2.0], [1.0, 1.0]) == 2.0


# -- what differs in training


@pytest.mark.parametrize(
    "predicted", ["", "nothing", "DELETE FROM patient", "DROP TABLE patient", f"{GOLD}; DROP TABLE patient", "SELECT 5"]
)
def test_what_does_not_read_the_data_earns_nothing(predicted: str, clinic: str) -> None:
    gold = "SELECT count(*) FROM patient"
    assert exec_match(predicted, gold, clinic) == soft_match(predicted, gold, clinic) == 0.0
    assert efficiency(predicted, gold, clinic) == 0.0
    assert exec_match("SELECT count(id) FROM patient;", gold, clinic) == 1.0


def test_a_broken_gold_is_an_error(clinic: str) -> None:
    with pytest.raises(RewardError, match="the gold query failed"):
        exec_match(GOLD, "SELECT nothing FROM patient", clinic)


def test_efficiency_by_steps_is_the_same_each_time_and_ranks_plans(tmp_path: Path) -> None:
    database = str(tmp_path / "big.sqlite")
    make_database(
        tmp_path / "big.sqlite",
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a INT); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 "
        "FROM n LIMIT 3000) INSERT INTO t SELECT i, i % 7 FROM n",
    )
    scan, lookup = "SELECT a FROM t WHERE id + 0 = 77", "SELECT a FROM t WHERE id = 77"
    figures = {name: efficiency(sql, scan, database) for name, sql in {"same": scan, "fast": lookup}.items()}
    assert figures == {"same": 1.0, "fast": math.sqrt(1.25)}
    assert efficiency(scan, lookup, database) == 0.5
    assert {efficiency(scan, scan, database) for _ in range(5)} == {1.0}
    assert efficiency(scan.replace("a", "max(a)"), scan, database) == 1.0  # nearly as many steps
    assert efficiency("SELECT a FROM t", scan, database) == 0.0  # another result


def test_efficiency_by_time_is_one_of_the_official_rewards(clinic: str) -> None:
    assert round(efficiency(GOLD, GOLD, clinic, clock="time") ** 2, 9) in (1.25, 1.0, 0.75, 0.5, 0.25)


# -- the domain


async def test_the_official_layout_is_read_with_the_evidence_in_the_question(tmp_path: Path) -> None:
    data = bird.load(str(make_bird(tmp_path)))
    assert [task["id"] for task in data.train] == ["train-0"]
    assert [task["id"] for task in data.validation] == ["dev-7", "dev-8", "dev-9"]
    assert data.left_out == {FAILS: 1}
    assert data.source == f"--data-dir {tmp_path}: train 1 tasks (1 databases), dev 3 tasks (1 databases)"
    task = data.validation[0]
    assert task["question"] == "Who is female?\nEvidence: female refers to sex = 'F'"
    assert data.validation[1]["question"] == "How many visits has each ward?"
    assert set(domains.visible_columns(bird, task)) == {"id", "db_id", "question", "evidence", "db_path"}
    assert domains.is_inside(bird.database(task), domains.database_folders(bird, str(tmp_path)))
    for name in ("bird_exec_match", "bird_soft_f1", "bird_efficiency"):
        assert await rewards.get(name)(task, task["query"], []) == 1.0
    assert await rewards.get("bird_r_ves")(task, "SELECT 1", []) == 0.0


def test_without_train_json_databases_of_dev_are_held_out(tmp_path: Path) -> None:
    rows = [{**DEV[0], "question_id": number, "db_id": f"db{number % 5}"} for number in range(20)]
    folder = make_bird(tmp_path, train=None, dev=rows)
    for number in range(5):
        make_database(folder / f"dev/dev_databases/db{number}/db{number}.sqlite", CLINIC)
    (folder / "dev/mini_dev_sqlite.json").write_text(json.dumps(rows[:3]))
    data = bird.load(str(folder))
    assert data.source.endswith("dev.json split by database")
    assert (len(data.train), len(data.validation)) == (16, 4)
    assert not {task["db_id"] for task in data.train} & {task["db_id"] for task in data.validation}
    with pytest.raises(DataError, match="no split 'mini_dev'; it has train, validation"):
        domains.load_split(bird, "mini_dev", str(folder))


def test_mini_dev_is_another_split_beside_train(tmp_path: Path) -> None:
    folder = make_bird(tmp_path)
    (folder / "dev/mini_dev_sqlite.json").write_text(json.dumps(DEV[:1]))
    assert [task["id"] for task in domains.load_split(bird, "mini_dev", str(folder)).validation] == ["mini_dev-7"]
    assert len(bird.load(str(folder)).validation) == 3


def test_a_prepared_folder_links_the_databases_and_lists_golds_that_are_broken_or_suspicious(tmp_path: Path) -> None:
    source, out = make_bird(tmp_path / "bird"), tmp_path / "out"
    result = CliRunner().invoke(app, ["--domain", "bird", "--source", str(source), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "task train-1 (toys): gold fails: no such column: cost" in result.output
    assert (out / "dev_databases/clinic/clinic.sqlite").is_symlink()
    before, after = bird.load(str(source)), bird.load(str(out))
    assert [task["question"] for task in after.validation] == [task["question"] for task in before.validation]
    assert [dict(task, db_path="") for task in after.train] == [dict(task, db_path="") for task in before.train]
    assert after.left_out == before.left_out
    assert [row["reasons"] for row in json.loads((out / "suspects.json").read_text())] == [[FAILS], [NO_ROWS]]
    assert domains.is_inside(after.train[0]["db_path"], domains.database_folders(bird, str(out)))
    (source / "train").rename(tmp_path / "gone")
    with pytest.raises(DataError, match="they are links into the folder that was prepared"):
        bird.load(str(out))


def test_answers_are_written_for_the_official_evaluator(tmp_path: Path) -> None:
    tasks = bird.load(str(make_bird(tmp_path / "bird"))).validation
    bird.write_predictions(tmp_path, tasks, {"dev-7": "SELECT name\nFROM patient;"}, 0)
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert predictions["0"] == "SELECT name FROM patient\t----- bird -----\tclinic"
    assert list(predictions) == ["0", "1", "2"]
    assert (tmp_path / "gold.sql").read_text().splitlines()[
        1
    ] == "SELECT ward, count(*) FROM visit GROUP BY ward\tclinic"
    levels = [json.loads(line)["difficulty"] for line in (tmp_path / "difficulty.jsonl").read_text().splitlines()]
    assert levels == ["simple", "moderate", "challenging"]


def test_errors_name_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--domain bird has no data of its own"):
        bird.load()
    with pytest.raises(DataError, match=r"is no BIRD folder: looked for train\.json, dev\.json"):
        bird.load(str(tmp_path))
    lost = make_bird(tmp_path / "a", train=[*TRAIN, {**TRAIN[0], "db_id": "lost"}])
    with pytest.raises(DataError, match=r"1 of 2 databases of .*train\.json are missing \(lost\)"):
        bird.load(str(lost))
    outside = make_bird(tmp_path / "b", train=[{**TRAIN[0], "db_id": "../toys"}])
    with pytest.raises(DataError, match=r"the db_id '\.\./toys' is not a plain name"):
        bird.load(str(outside))
    no_sql = make_bird(tmp_path / "c", dev=[{**DEV[0], "SQL": ""}])
    with pytest.raises(DataError, match=r"dev\.json, row 0: SQL is empty"):
        bird.load(str(no_sql))
