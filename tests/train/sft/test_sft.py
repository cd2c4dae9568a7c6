"""Supervised fine-tuning: what is learned is what the agents send, packing changes no loss, a run can be continued."""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dev.pretrain.model import new_policy
from programs import ROOT
from transformers import BertConfig, BertLMHeadModel

from groundwire import adapters
from groundwire.adapters import Endpoint, Question
from groundwire.adapters.sql_agents import prompts
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.domains import Domain, TaskData, get
from groundwire.tools.schema import table_info
from groundwire.tools.sql import run_query
from groundwire.tools.types import TEXT
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.local.packing import make_rows, pack, packed_logits
from groundwire.train.policy import STARTER
from groundwire.train.policy.attention import set_attention
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.template import render
from groundwire.train.policy.errors import UnsupportedModelError
from groundwire.train.policy.model import load_policy
from groundwire.train.sft import trainer as trainer_module
from groundwire.train.sft.data import golds
from groundwire.train.sft.data.examples import Example, Turn, encode
from groundwire.train.sft.data.golds import GoldTurns, answer_turns, check_golds, make_questions, write_turns
from groundwire.train.sft.data.load import _first_question, _split, accepted_rollouts, read_chats
from groundwire.train.sft.data.variants import make_variant, wrong_query
from groundwire.train.sft.run import run
from groundwire.train.sft.several_gpus import check_gpus, read_steps, verl_settings, write_examples
from groundwire.train.sft.trainer import SFTTrainer, make_steps

SCHEMA = (
    "CREATE TABLE singer ( Singer_ID int , Name text , Age int , primary key ( Singer_ID ) )\n"
    "-- Name : 'Joe' , 'Ann'\n"
    "CREATE TABLE concert ( Concert_ID int , Singer_ID int , "
    "foreign key ( Singer_ID ) references singer ( Singer_ID ) )\n"
    'CREATE TABLE stadium ( Stadium_ID int , "Built in" text )'
)
GOLD = (
    "SELECT T1.Name FROM singer AS T1 JOIN concert AS T2 ON T1.Singer_ID = T2.Singer_ID "
    "WHERE T1.Name != 'Name' ORDER BY T1.Age"
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "How many?"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
}
ANSWERS = [
    CALL,
    {"role": "tool", "tool_call_id": "c", "content": "4"},
    {"role": "assistant", "content": "hm", "weight": 0},
    USER,
    {"role": "assistant", "content": "Four."},
]


def _chats(file: Path, *chats: Any) -> str:
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(file)


class _Domain(Domain):
    name, default_reward = "pets", "spider_exec_match"

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def load(self, data_dir: str | None = None) -> TaskData:
        rows = [
            {
                "id": f"p{age}",
                "question": f"Older than {age}?",
                "query": f"SELECT name FROM pet WHERE age > {age}",
            }
            for age in range(8)
        ]
        return TaskData(train=rows[:6], validation=rows[6:], source="pets")

    def database(self, task: Any) -> str:
        return self.path


@pytest.fixture
def pets(tmp_path: Path) -> _Domain:
    with sqlite3.connect(tmp_path / "pets.sqlite") as conn:
        conn.executescript("CREATE TABLE pet (name TEXT, age INT); INSERT INTO pet VALUES ('Rex', 3), ('Tom', 7);")
    conn.close()
    return _Domain(tmp_path / "pets.sqlite")


@pytest.fixture(scope="module")
def starter() -> tuple[Any, Any]:
    return load_policy(STARTER)


def _questions(domain: _Domain, settings: SFTSettings, *, wrong: bool = True) -> Any:
    return make_questions(domain, domain.load().train, settings, wrong=wrong, on_end=lambda: None)


def test_the_first_turn_is_the_agents_prompt(pets: _Domain) -> None:
    settings = SFTSettings(backend=["langgraph", "openai-agents"])
    question = _questions(pets, settings, wrong=False)[0]
    text, tools = write_turns(question, settings)
    schema = table_info(pets.path, max_chars=4000, example_values=0, show_keys=False).text
    assert [each["content"] for each in text.messages] == [
        prompts.write("system", schema),
        prompts.write("write", question.question),
    ]
    assert prompts.extract_sql(text.reply["content"]) == question.gold
    assert tools.messages[0]["content"] == prompts.write("tool_system", schema)
    assert json.loads(tools.reply["tool_calls"][0]["function"]["arguments"]) == {"sql": question.gold}
    assert tools.tools[0]["function"] == prompts.QUERY_TOOL


def test_later_turns_show_the_result_of_a_query_that_ran(pets: _Domain) -> None:
    settings = SFTSettings(backend=["langgraph", "openai-agents"], later_turns=1.0, augment=0.0)
    questions = _questions(pets, settings)
    assert all(any(not query.right for query in question.queries) for question in questions)
    for question in questions:
        right = run_query(question.database, question.gold).rows
        for query in question.queries:
            if not query.result.startswith("Error: "):
                assert (run_query(question.database, query.sql).rows == right) == query.right
    source = GoldTurns(questions, settings)
    replies = [
        turn.reply["content"]
        for epoch in range(6)
        for turn in source.turns(source.groups(epoch)[0], epoch)
        if "Is the query" in str(turn.messages[-1]["content"])
    ]
    assert set(replies) == {prompts.CORRECT, prompts.INCORRECT}
    ends = [
        turn for epoch in range(6) for turn in source.turns(source.groups(epoch)[0], epoch) if len(turn.messages) > 2
    ]
    assert {turn.reply["content"] for turn in ends} == {prompts.DONE, ""}


@pytest.mark.parametrize("profile", ["short", "full"])
@pytest.mark.parametrize("first_is_right", [True, False])
@pytest.mark.parametrize("backend", ["openai-agents", "langgraph"])
async def test_each_turn_on_the_way_to_an_answer_in_prose_is_learned(
    backend: str, first_is_right: bool, profile: Any, starter: tuple[Any, Any]
) -> None:
    domain = get("medical")
    task = domain.load().train[0]
    settings = SFTSettings(backend=[backend], agent_options={"prompt_profile": profile}, later_turns=1.0, augment=0.0)
    [question] = make_questions(domain, [task], settings, wrong=True, on_end=lambda: None)
    wrong = next(query.sql for query in question.queries if not query.right)
    source = GoldTurns([question], settings)
    turns = [turn for epoch in range(40) for turn in source.turns([question], epoch)]
    learned = {_served_prompt(starter[1], turn.messages, turn.tools): turn.reply for turn in turns}
    used = []

    def reply(request: dict[str, Any]) -> Reply:
        if len(server.requests) == 1 and not first_is_right:
            call = {"id": "c", "type": "function", "function": {"name": "query_database_by_sql"}}
            call["function"] |= {"arguments": json.dumps({"sql": wrong})}
            return Reply(text=prompts.fence(wrong)) if backend == "langgraph" else Reply(tool_calls=[call])
        used.append(learned[_served_prompt(starter[1], request["messages"], request.get("tools") or [])])
        if backend == "openai-agents" and not first_is_right:  # it learns the query after a wrong one, no further turn
            return Reply(text=task["answer"])
        return Reply(text=used[-1]["content"], tool_calls=used[-1].get("tool_calls") or ())

    given = {"example_values": 0, "show_keys": False, "max_turns": 3, "prompt_profile": profile}
    agent = adapters.get(backend)(**given)
    async with ScriptedPolicyServer(replies=reply) as server:
        asked = Question(id="1", text=task["question"], database=domain.database(task), answers=TEXT)
        answer = await agent.run(asked, Endpoint(base_url=server.base_url, model=server.model))
        await agent.stop()
    assert answer.text == task["answer"]
    assert (
        len(used)
        == {(True, True): 3, (True, False): 4, (False, True): 2, (False, False): 1}[
            backend == "langgraph", first_is_right
        ]
    )
    held_out = {_served_prompt(starter[1], turn.messages, turn.tools) for turn in answer_turns(question, settings)}
    assert len(held_out & set(learned)) == 1


def _served_prompt(tokenizer: Any, messages: Any, tools: Any) -> str:
    request = parse_request({"messages": list(messages), "tools": list(tools)}, served="")
    return render(tokenizer, request.template_messages, tools=request.tools or None)


def test_an_epoch_has_every_question_and_another_order(pets: _Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golds, "QUESTIONS_PER_SCHEMA", (2, 2))
    settings = SFTSettings()
    source = GoldTurns(_questions(pets, settings, wrong=False), settings)
    orders = [[question.id for group in source.groups(epoch) for question in group] for epoch in (0, 1, 0)]
    assert sorted(orders[0]) == sorted(orders[1]) == [f"p{age}" for age in range(6)]
    assert orders[0] == orders[2] != orders[1]


_TURNS = """
import hashlib
from groundwire.domains import get
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.sft.data.golds import GoldTurns, make_questions
from groundwire.tools.types import TEXT

domain, settings = get("spider"), SFTSettings(backend=["langgraph", "openai-agents"], later_turns=1.0)
questions = make_questions(domain, domain.load().train[:60], settings, wrong=True, on_end=lambda: None)
source = GoldTurns(questions, settings)
turns = [source.turns(group, 0) for group in source.groups(0)]
print(hashlib.sha256(repr(turns).encode()).hexdigest())
"""


def test_a_seed_gives_the_same_turns_in_every_process() -> None:
    made = set()
    for seed in "12":  # strings have other hashes, so sets have another order
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _TURNS], env=environment, capture_output=True, check=True)
        made.add(done.stdout)
    assert len(made) == 1


def test_a_changed_schema_keeps_the_tables_of_the_query_and_renames_both_alike() -> None:
    kept = renamed = reordered = 0
    for seed in range(60):
        variant = make_variant(random.Random(seed), SCHEMA, [GOLD], augment=0.7)
        sql = variant.rename(GOLD)
        assert "'Name'" in sql  # a literal
        assert "'Joe' , 'Ann'" in variant.text
        assert '"Built in" text' in variant.text or "Built in" not in variant.text
        conn = sqlite3.connect(":memory:")
        ddl = [line for line in variant.text.split("\n") if line.startswith("CREATE")]
        for line in sorted(ddl, key=lambda line: "references" in line):
            conn.execute(line)
        conn.execute(sql)
        conn.close()
        kept += len(ddl) == 3
        renamed += bool(variant.names)
        reordered += variant.text.split("\n")[0] != SCHEMA.split("\n", maxsplit=1)[0]
    assert 30 < kept < 60  # unused tables are dropped at times, not always
    assert renamed > 10
    assert reordered > 10
    assert make_variant(random.Random(0), SCHEMA, [GOLD], augment=0.0).text == SCHEMA


def test_a_wrong_query_is_another_query() -> None:
    made = {wrong_query(random.Random(seed), GOLD, ["Name", "Age", "singer"], ["SELECT 2"]) for seed in range(40)}
    assert len(made) > 5
    assert GOLD not in made


def test_packing_changes_no_loss(starter: tuple[Any, Any]) -> None:
    model, _ = starter
    assert set_attention(model)
    rng = random.Random(0)
    schema = [rng.randrange(5, 200) for _ in range(40)]
    examples = [Example([*schema, *rng.sample(range(5, 99), 8)], rng.sample(range(5, 99), 5)) for _ in range(5)]
    examples.append(Example(rng.sample(range(5, 99), 20), [7, 8, 9]))
    rows = make_rows(examples, tokens=150)
    assert sum(row.targets for row in rows) == 28
    assert sum(row.length for row in rows) < sum(map(len, examples))
    packed = pack(rows)
    together = F.cross_entropy(packed_logits(model, packed), packed.targets, reduction="sum").item()
    alone = 0.0
    for each in examples:
        logits = model(torch.tensor([each.prompt_ids + each.response_ids])).logits[0, len(each.prompt_ids) - 1 : -1]
        alone += F.cross_entropy(logits, torch.tensor(each.response_ids), reduction="sum").item()
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_reply_ends_as_a_sampled_one_does(starter: tuple[Any, Any]) -> None:
    _, tokenizer = starter
    turn = Turn([{"role": "user", "content": "x"}], {"role": "assistant", "content": "SELECT 1"})
    [example] = encode(tokenizer, [turn])
    assert example.response_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(example.response_ids[:-1]) == "SELECT 1"
    assert tokenizer.decode(example.prompt_ids).endswith("assistant\n")


def test_a_run_learns_and_is_continued_at_the_same_place(
    pets: _Domain, starter: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "WARMUP_STEPS", 1)
    settings = SFTSettings(model="starter", epochs=6.0, learning_rate=2e-3, later_turns=0.0, augment=0.0)
    source = GoldTurns(_questions(pets, settings, wrong=False), settings)

    def steps(tokenizer: Any, first: int) -> Any:
        groups = (source.turns(source.groups(number)[0], number) for number in range(first, 6))
        return make_steps((make_rows(encode(tokenizer, each), tokens=2048) for each in groups), 1, first=first)

    losses: list[dict[str, Any]] = []
    model, tokenizer = load_policy(STARTER)
    trainer = SFTTrainer(model, tokenizer, settings, checkpoints=Checkpoints(tmp_path / "checkpoints"))
    all_steps = list(steps(tokenizer, 0))
    trainer.train(all_steps[:3], 6, [], losses.append)
    trainer.train(all_steps[3:], 6, [], losses.append)
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    checkpoint, _ = trainer.checkpoints.paths()
    model, tokenizer = load_policy(checkpoint)
    again = SFTTrainer(model, tokenizer, settings, checkpoints=trainer.checkpoints)
    again.load(torch.load(checkpoint / "trainer.pt", weights_only=True))
    assert (again.step, again.groups) == (3, 3)
    repeated: list[dict[str, Any]] = []
    again.train(steps(tokenizer, again.groups), 6, [], repeated.append)
    assert [each["loss"] for each in repeated] == pytest.approx([each["loss"] for each in losses[3:]], abs=2e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 9000}, "max_model_len is 9000, and the model has 4096 positions"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    checked = SFTSettings(model="starter", output_dir=str(tmp_path / "out"), later_turns=0.0, val_tasks=1, **settings)
    with pytest.raises(ConfigError, match=message) as raised:
        list(run(checked, resume=None, given={}))
    assert "\n" not in str(raised.value)


def test_turns_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    chats = [{"messages": [{**USER, "content": "x" * count}, ANSWERS[-1]]} for count in (10, 400)]
    given = {"chats": _chats(tmp_path / "c.jsonl", *chats), "output_dir": str(tmp_path / "out"), "model": "starter"}
    with pytest.raises(ConfigError, match="no turn fits into max_model_len, 5 tokens"):
        list(run(SFTSettings(max_model_len=5, **given), resume=None, given={}))
    assert not list((tmp_path / "out").iterdir())
    lines = list(run(SFTSettings(max_model_len=100, epochs=2.0, **given), resume=None, given={}))
    assert lines[-1] == "note: left out 2 turns longer than max_model_len, 100 tokens"


def test_data_without_golds_is_refused() -> None:
    data = TaskData(train=[{"id": "1", "question": "?"}], validation=[], source="here")
    with pytest.raises(ConfigError, match="here: no training task has a gold query"):
        check_golds(get("spider"), data)
    with pytest.raises(
        ConfigError, match=r"here: no training task has an answer and the query .* \(columns answer and sql\)"
    ):
        check_golds(get("medical"), TaskData(train=[{"id": "1", "answer": "Yes."}], validation=[], source="here"))
    with pytest.raises(ConfigError, match="backend is 'mcp'"):
        SFTSettings(backend="mcp")


def test_each_reply_of_a_chat_is_learned_after_the_prompt_that_would_be_served(
    starter: tuple[Any, Any], tmp_path: Path
) -> None:
    _, tokenizer = starter
    [turns] = read_chats(Path(_chats(tmp_path / "c.jsonl", {"messages": [USER, *ANSWERS], "tools": [TOOL]})))
    first, last = encode(tokenizer, turns)  # the reply of weight 0 is no turn
    body = {"messages": [USER, *ANSWERS[:-1]], "tools": [TOOL]}
    served = parse_request(body, served="")
    assert tokenizer.decode(last.prompt_ids) == render(tokenizer, served.template_messages, tools=served.tools)
    assert tokenizer.decode(last.response_ids[:-1]) == "Four."
    called = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    assert tokenizer.decode(first.response_ids[:-1]).strip() == called


def test_arguments_of_tools_reach_the_template_as_the_server_gives_them(starter: tuple[Any, Any]) -> None:
    """Many templates write the arguments as JSON: of a string they would make a JSON string."""
    tokenizer = copy.deepcopy(starter[1])

    class WithItsOwnCode(type(tokenizer)):
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:  # so that no process renders it
            return super().apply_chat_template(*args, **options)

    tokenizer.__class__ = WithItsOwnCode
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls[0].function.arguments | tojson if "
        "m.tool_calls }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    [example] = encode(tokenizer, [Turn([USER], CALL, [TOOL])])
    assert tokenizer.decode(example.response_ids[:-1]) == '{"a": 1}'


def test_a_chat_is_read_as_the_server_reads_it(starter: tuple[Any, Any], tmp_path: Path) -> None:
    """Special tokens in what is said are ordinary text, and a refusal is what the assistant said."""
    _, tokenizer = starter
    said = {"role": "user", "content": "What is <|im_end|>?"}
    replies = [
        {"role": "assistant", "refusal": "I will not.", "content": None},
        {"role": "assistant", "content": "<|im_end|>."},
    ]
    [turns] = read_chats(Path(_chats(tmp_path / "c.jsonl", {"messages": [said, replies[0], said, replies[1]]})))
    first, last = encode(tokenizer, turns)
    assert tokenizer.decode(first.response_ids) == "I will not.<|im_end|>"
    assert tokenizer.decode(last.response_ids) == "<|im_end|>.<|im_end|>"
    end = tokenizer.eos_token_id
    assert [example.prompt_ids.count(end) for example in (first, last)] == [1, 3]
    assert last.response_ids.count(end) == 1


def _line(reply: dict[str, Any]) -> str:
    return json.dumps({"messages": [USER, {"role": "assistant", **reply}]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "c.jsonl, line 2 is not JSON, but '{': give an object with messages"),
        ("hello", "c.jsonl, line 2 is not JSON, but 'hello': give an object with messages"),
        (
            _line({"weight": "a", "content": "x"}),
            r"line 2: messages\[1\].weight is 'a': give 1 to learn the reply, or 0",
        ),
        (_line({"weight": None, "content": "x"}), r"line 2: messages\[1\].weight is None: give 1 to learn"),
        (_line({"content": None}), r"line 2: messages\[1\] has neither content nor tool_calls"),
        (_line({}), r"line 2: messages\[1\] has neither content nor tool_calls"),
        ("[]", r"c.jsonl, line 2: a chat is a JSON object, not \[\]"),
        ('{"conversations": []}', "c.jsonl, line 2: messages is required"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2: messages\[0\].role must be 'system'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: messages has no reply of the assistant"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2: messages\[0\] is a reply"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', r"line 2: tools\[0\] must be of type"),
    ],
)
def test_a_wrong_line_of_chats_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": [USER, ANSWERS[-1]]}) + f"\n{line}\n")
    with pytest.raises(ConfigError, match=message) as raised:
        read_chats(file)
    assert "\n" not in str(raised.value)


def test_a_chat_whose_tools_the_template_lacks_is_named_by_its_line(tmp_path: Path, starter: tuple[Any, Any]) -> None:
    tokenizer = copy.deepcopy(starter[1])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = _chats(tmp_path / "c.jsonl", {"messages": [USER, ANSWERS[-1]]}, {"messages": [USER, CALL], "tools": [TOOL]})
    with pytest.raises(ConfigError, match=r"c\.jsonl, line 2: the model's chat template has no tools"):
        encode(tokenizer, [turn for chat in read_chats(Path(file)) for turn in chat])


def test_a_chat_that_is_too_long_has_one_message_without_the_settings_of_schemas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = _chats(tmp_path / "c.jsonl", {"messages": [{**USER, "content": "x y " * 5000}, ANSWERS[-1]]})
    settings = SFTSettings(chats=file, output_dir=str(tmp_path / "out"), model="starter")
    with pytest.raises(ConfigError, match=r"max_model_len, 2048 tokens: give more, or shorter chats$"):
        list(run(settings, resume=None, given={}))
    assert "indexing errors" not in capfd.readouterr().err


def test_a_file_of_chats_without_chats_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_chats(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no chats"):
        read_chats(Path(_chats(tmp_path / "empty.jsonl")))
    with pytest.raises(ConfigError, match="chats is 'a' and rollouts 'b': give one of them"):
        SFTSettings(chats="a", rollouts="b")


def test_chats_with_the_same_first_question_are_on_one_side(tmp_path: Path) -> None:
    asked = [f"Question {i % 30}?" for i in range(60)]
    reply = {"role": "assistant", "content": "yes"}
    chats = [{"messages": [{"role": "user", "content": text}, reply]} for text in asked]
    settings = SFTSettings(chats=_chats(tmp_path / "c.jsonl", *chats))
    learned, held_out = _split(read_chats(Path(str(settings.chats))), settings, _first_question)
    assert (len(learned), len(held_out)) == (54, 6)
    assert not set(map(_first_question, learned)) & set(map(_first_question, held_out))


def test_a_run_of_chats_is_stopped_resumed_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "WARMUP_STEPS", 1)
    monkeypatch.setattr(trainer_module, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(trainer_module, "VAL_EVERY", 1)
    chats = [{"messages": [USER, {"role": "assistant", "content": f"{i % 3} rows"}]} for i in range(20)]
    settings = SFTSettings(
        model="starter", chats=_chats(tmp_path / "c.jsonl", *chats), output_dir=str(tmp_path), epochs=1.0,
        tokens_per_step=200, learning_rate=1e-3,
    )  # fmt: skip
    lines = list(run(settings, resume=None, given={}))
    assert any("18 chats to learn, 2 held out" in line for line in lines)
    [folder] = [each for each in tmp_path.iterdir() if each.is_dir()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["held_out_loss"] < metrics[0]["held_out_loss"]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 99}\n')  # of a step after the last checkpoint, when the process was killed
    lines = list(run(SFTSettings(), resume=folder, given={"epochs": 2.0}))
    more = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in more] == list(range(1, len(more) + 1))
    assert len(more) > len(metrics)
    model, _ = load_policy(folder / "model")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], f"held-out loss: {summary['held_out_loss']:.4f}" in lines) == (len(more), True)
    assert model.config.model_type == "llama"


ROW = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]


def _rollout(task: str, reward: float | None, *reply: int, step: int = 1, mode: str = "train") -> dict[str, Any]:
    ids = list(reply)
    call = {**ROW["calls"][0], "prompt_ids": [5, 6], "response_ids": ids, "logprobs": [0.0] * len(ids)}
    return {**ROW, "task_id": task, "reward": reward, "step": step, "mode": mode, "calls": [call]}


def test_accepted_rollouts_are_the_best_different_ones_of_each_task(tmp_path: Path) -> None:
    given = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    given.write_rows(1, [_rollout("a", 1.0, 7), _rollout("a", 1.0, 8), _rollout("a", 0.4, 9), _rollout("b", 0.9, 7)])
    given.write_rows(2, [_rollout("a", 1.0, 7, step=2), _rollout("a", 2.0, 5, step=2), _rollout("c", None, 7)])
    given.write_rows(2, [_rollout("d", 1.0, 4, mode="val")], kind="val")
    replies = {number: [] for number in (0, 1, 2)}
    for number, found in replies.items():
        tasks, _ = accepted_rollouts(given, min_reward=0.9, per_task=number)
        found += [[each.response_ids for each in examples] for examples in tasks]
    assert replies == {0: [[[5], [7], [8]], [[7]]], 1: [[[5]], [[7]]], 2: [[[5], [7]], [[7]]]}
    with pytest.raises(ConfigError, match=r"reward of at least 3: the highest reward of 6 is 2"):
        accepted_rollouts(given, min_reward=3.0, per_task=1)
    given.write_config({**given.config(), "evaluation": {}})
    with pytest.raises(ConfigError, match=r"which is never learned: give the folder of a groundwire run"):
        accepted_rollouts(given, min_reward=0.0, per_task=1)


def _calls_of(tokenizer: Any, *replies: tuple[str, str]) -> list[dict[str, Any]]:
    made = []
    for number, (agent, text) in enumerate(replies):
        ids = tokenizer(text)["input_ids"]
        prompt = {"agent": agent, "prompt_ids": [5, number], "response_ids": ids, "logprobs": [0.0] * len(ids)}
        made.append({**ROW["calls"][0], **prompt})
    return made


def _steps(*queries: str) -> str:
    return json.dumps([{"agent": "run", "kind": "tool", "input": sql, "output": "", "ok": True} for sql in queries])


WRITE = ("write_query", "```sql\nSELECT count(*) FROM singer WHERE age > 5\n```")
CHECK = ("check_query", "INCORRECT")
REWRITE = ("rewrite_query", "```sql\nSELECT count(*) FROM singer WHERE age < 5\n```")


@pytest.mark.parametrize(
    ("replies", "queries", "agent_match", "learned", "left_out"),
    [
        ([WRITE, CHECK, REWRITE], [WRITE[1], REWRITE[1]], None, [1, 2], {"queries that the agent itself rejected": 1}),
        ([WRITE, CHECK, REWRITE], [WRITE[1], REWRITE[1]], "query$", [1, 2], {"queries that the agent itself": 1}),
        ([WRITE, CHECK, REWRITE], [WRITE[1], REWRITE[1]], "write", [2], {"calls of agents": 1, "queries that": 1}),
        ([REWRITE, CHECK, REWRITE], [REWRITE[1], REWRITE[1]], None, [0, 2], {"calls that rejected the accepted": 1}),
        ([REWRITE, ("check_query", "CORRECT")], [REWRITE[1]], None, [0, 1], {}),
        # as a tool call, with a look at the schema and a part of the rejected query as the answer
        (
            [
                ("sql", 'query{"sql": "SELECT name\\nFROM sqlite_master"}'),
                ("sql", 'query{"sql": "SELECT count(*)\\nFROM singer LIMIT 1"}'),
                ("sql", 'query{"sql": "SELECT count(*)\\nFROM singer"}'),
                ("sql", "There are 3."),
            ],
            ["SELECT name\nFROM sqlite_master", "SELECT count(*)\nFROM singer LIMIT 1", "SELECT count(*)\nFROM singer"],
            None,
            [0, 2, 3],
            {"queries that": 1},
        ),
    ],
)  # fmt: skip
def test_accepted_rollouts_teach_the_calls_of_trained_agents_without_queries_that_the_agent_rejected(
    replies: list[tuple[str, str]],
    queries: list[str],
    agent_match: str | None,
    learned: list[int],
    left_out: dict[str, int],
    tmp_path: Path,
    starter: tuple[Any, Any],
) -> None:
    config = resolve("fast", model="starter", agent_match=agent_match).to_dict()
    given = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)
    calls = _calls_of(starter[1], *replies)
    plain = [query.removeprefix("```sql\n").removesuffix("\n```") for query in queries]
    row = {**_rollout("a", 1.0), "calls": calls, "agent_steps": _steps(*plain), "answer": plain[-1]}
    given.write_rows(1, [row])
    [examples], counts = accepted_rollouts(given, min_reward=1.0, per_task=0)
    assert [each.prompt_ids[1] for each in examples] == learned
    assert len(counts) == len(left_out)
    assert all(any(name.startswith(each) for name in counts) for each in left_out)
    assert sum(counts.values()) == sum(left_out.values())


def test_accepted_rollouts_of_a_run_that_trained_no_such_agent_are_refused(tmp_path: Path) -> None:
    config = resolve("fast", agent_match="planner").to_dict()
    given = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)
    given.write_rows(1, [_rollout("a", 1.0, 7)])
    with pytest.raises(ConfigError, match="no accepted rollout with a call of an agent of agent_match 'planner'"):
        accepted_rollouts(given, min_reward=1.0, per_task=0)


def test_accepted_rollouts_are_learned_with_the_runs_own_model_and_prompts(
    tmp_path: Path, starter: tuple[Any, Any]
) -> None:
    config = resolve("fast", agent_options={"show_keys": True}, model="starter", max_model_len=300).to_dict()
    given = RunDir.create(tmp_path / "runs", backend="langgraph", domain="spider", config=config)
    given.write_rows(1, [_rollout(f"t{i}", 1.0, 40 + i % 2, 41) for i in range(12)])
    settings = SFTSettings(rollouts=str(given.path), output_dir=str(tmp_path / "out"), epochs=1.0, val_tasks=2)
    lines = list(run(settings, resume=None, given={"epochs": 1.0}))
    assert any("11 calls of 11 tasks to learn, of 1 task held out" in line for line in lines)
    assert any(line.startswith("execution accuracy of first queries, langgraph") for line in lines)
    [folder] = (tmp_path / "out").iterdir()
    stored = json.loads((folder / "config.json").read_text())["sft"]
    assert (stored["model"], stored["agent_options"]["show_keys"], stored["max_model_len"]) == ("starter", True, 300)
    _, tokenizer = starter
    new_policy(tokenizer, width=16, layers=1, heads=2, intermediate=16).save_pretrained(tmp_path / "other")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="token ids of another tokenizer than that of"):
        list(run(settings, resume=None, given={"model": str(tmp_path / "other")}))


def test_a_resumed_run_has_the_data_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("fast", model="starter", max_model_len=300).to_dict()
    first, second = (
        RunDir.create(tmp_path / "runs", backend="langgraph", domain="spider", config=config) for _ in range(2)
    )
    first.write_rows(1, [_rollout(f"t{i}", 1.0, 40) for i in range(5)])
    latest = tmp_path / "runs" / "a-link"
    latest.symlink_to(first.path.name)
    monkeypatch.chdir(tmp_path)
    given = {"rollouts": "runs/a-link", "output_dir": str(tmp_path / "out"), "val_tasks": 1, "epochs": 1.0}
    list(run(SFTSettings(**given), resume=None, given=given))
    latest.unlink()
    latest.symlink_to(second.path.name)  # another run began
    [folder] = (tmp_path / "out").iterdir()
    monkeypatch.chdir(tmp_path / "out")
    lines = list(run(SFTSettings(), resume=folder, given={"epochs": 2.0}))
    assert lines[0] == f"data: {first.path}"
    assert any("5 calls of 5 tasks to learn" in line for line in lines)


def test_a_run_that_is_stopped_while_it_is_measured_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [{"messages": [USER, ANSWERS[-1]]}] * 10
    settings = SFTSettings(model="starter", chats=_chats(tmp_path / "c.jsonl", *chats), output_dir=str(tmp_path / "o"))

    def stop(*_: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(SFTTrainer, "loss", stop)
        with pytest.raises(KeyboardInterrupt, match="stopped; continue with groundwire sft"):
            list(run(settings, resume=None, given={}))
    [folder] = (tmp_path / "o").iterdir()
    lines = list(run(SFTSettings(), resume=folder, given={}))
    assert lines[-1].startswith("held-out loss: ")
    assert any("; 1 step, " in line for line in lines)


def test_a_model_that_cannot_be_sampled_is_refused_before_training(tmp_path: Path, starter: tuple[Any, Any]) -> None:
    tokenizer = starter[1]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "initializer_range": 1.0}
    BertLMHeadModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    settings = SFTSettings(model=str(tmp_path / "bert"), max_model_len=512, output_dir=str(tmp_path / "out"))
    with pytest.raises(UnsupportedModelError, match=r"BertLMHeadModel cannot be sampled token by token: its log-"):
        list(run(settings, resume=None, given={}))
    assert not list((tmp_path / "out").iterdir())


def test_a_model_without_a_chat_template_is_refused_before_training(tmp_path: Path) -> None:
    shutil.copytree(STARTER, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    settings = SFTSettings(model=str(tmp_path / "plain"), output_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"plain has no chat template: use an instruct model"):
        list(run(settings, resume=None, given={}))
    assert not list((tmp_path / "out").iterdir())


VERL_KEYS = set(json.loads((ROOT / "tests" / "data" / "verl_0_9_1_sft_keys.json").read_text()))


def test_every_key_for_several_gpus_is_one_of_verls_trainer_or_marked_as_new(tmp_path: Path) -> None:
    settings = SFTSettings(gpus=2, device="cuda")
    values = verl_settings(settings, model=STARTER, learning_rate=1e-4, folder=tmp_path, batch=8)
    assert not [key for key in values if key.lstrip("+") not in VERL_KEYS and not key.startswith("+")]
    assert not [key for key in values if key.startswith("+") and key[1:] in VERL_KEYS]


def test_verl_reads_the_examples_that_one_gpu_learns(tmp_path: Path) -> None:
    examples = [Example([number, 5, 6], [7, number]) for number in range(2000)]
    assert write_examples(tmp_path / "a" / "train.jsonl", iter(examples)) == (2000, 10000)
    values = verl_settings(SFTSettings(), model=STARTER, learning_rate=1e-4, folder=tmp_path, batch=8)
    module, name = values["data.custom_cls.path"].removeprefix("pkg://"), values["data.custom_cls.name"]
    dataset = getattr(importlib.import_module(module), name)(
        parquet_files=str(tmp_path / "a" / "train.jsonl"), tokenizer=None, config=None, processor=None, max_samples=-1
    )
    assert len(dataset) == 2000
    row = {key: value.tolist() for key, value in dataset[1500].items()}
    assert row == {
        "input_ids": [1500, 5, 6, 7, 1500],
        "position_ids": [0, 1, 2, 3, 4],
        "loss_mask": [0, 0, 0, 1, 1],
    }


def test_the_log_of_verl_becomes_metrics(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"step": 1, "data": {"train/loss": 2.0, "train/grad_norm": 1.0, "train/lr": 1e-4, "train/global_tokens": 9}},
        {"step": 2, "data": {"train/loss": 1.0}},
        {"step": 2, "data": {"val/loss": 1.5}},
    ]
    log = tmp_path / "verl.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in entries) + '{"step": 3, "da')
    assert read_steps(log) == [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens": 9},
        {"step": 2, "loss": 1.0, "held_out_loss": 1.5},
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "gpus is 2 and device 'cpu': give --device cuda"),
        ({"time_limit_s": 5.0}, "time_limit_s is for one GPU"),
        ({}, "gpus is 99, and torch finds"),
    ],
)
def test_gpus_that_are_not_there_are_refused(settings: dict[str, Any], message: str) -> None:
    count = 99 if not settings else 2
    with pytest.raises(ConfigError, match=message):
        check_gpus(SFTSettings(**{"gpus": count, "device": "cuda", **settings}))
