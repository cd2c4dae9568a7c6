"""Damage the files that commands read, and run these commands: each must end in a sentence.

``python tests/fuzz_files.py --seed 1 --cases 100`` prints the failures and a count. A failure is a traceback, a crash,
an exit status that no command has, too much output, time or memory.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import programs
from spider_folder import DEV, TRAIN, make_spider

TIMEOUT_S = 60.0
MAX_MEMORY_MB = 2500
MAX_OUTPUT = 8000
"""Characters of the output of a command that failed: a message must not repeat a damaged file."""

_STATUSES = (0, 1, 2)
_CRASH = re.compile(r"Traceback|panicked at|Fatal Python error|a check raised|Segmentation fault|Exception ignored")
_SETTINGS = "steps=2\ntasks_per_step=1\ngroup_size=2\nval_tasks=2\nn_runners=4\nmax_tokens=8\n"
_RESUME = ("-m", "groundwire.train.run", "--resume", "run", "--steps", "2")
_READ_RUN = (
    _RESUME,
    ("-m", "groundwire.train.evaluate", "run"),
    ("-m", "groundwire.train.evaluate", "run", "--format", "json"),
    ("-m", "groundwire.train.evaluate", "run", "run", "--compare"),
    ("-m", "groundwire.train.report", "run"),
    ("-m", "groundwire.train.why", "run"),
    ("-m", "groundwire.train.why", "run", "ro-"),
    ("-m", "groundwire.train.replay", "run", "--reward", "executes"),
)
_READ_SPIDER = (
    ("-m", "groundwire.train.audit", "--data-dir", "spider"),
    ("-m", "groundwire.domains.spider.prepare", "--source", "spider", "--out", "out"),
    ("-m", "groundwire.train.run", "--data-dir", "spider", "--print-config"),
)
_READ_PREPARED = (
    *(("-m", "groundwire.train.audit", "--data-dir", "prepared"), ("-m", "groundwire.train.run", "--data-dir", "prepared", "--print-config")),
    ("-m", "groundwire.domains.spider.prepare", "--source", "spider", "--out", "prepared"),
)
_READ_MEDICAL = (("-m", "groundwire.train.audit", "--domain", "medical", "--data-dir", "medical", "--limit", "4"),)
_READ_MODEL = (
    ("-m", "groundwire.train.doctor", "--model", "model"),
    ("-m", "groundwire.train.run", "--dev", "--config", "settings.toml", "--model", "model", "--data-dir", "prepared"),
    ("-m", "groundwire.train.evaluate", "--model", "model", "--tasks", "1", "--data-dir", "prepared", "--max-tokens", "8"),
)
_READ_SETTINGS = (("-m", "groundwire.train.run", "--print-config", "--config"), ("-m", "groundwire.train.evaluate", "--config"))
_READ_DATABASE = (("-m", "groundwire.tools.mcp_sql", "--database", "prepared/database"), ("-m", "groundwire.train.audit", "--data-dir", "prepared"))


class Case(NamedTuple):
    """``command`` (for :func:`programs.run`) in ``folder``, one file of which is damaged as ``description`` says."""

    description: str
    command: tuple[str, ...]
    folder: Path


class Target(NamedTuple):
    """A file, a pattern below the folder, and the commands that read it."""

    file: str
    commands: tuple[tuple[str, ...], ...]


TARGETS = (
    *(
        Target(f"run/{name}", _READ_RUN)
        for name in ("config.json", "metrics.jsonl", "rollouts/*.parquet", "rollouts/*.parquet", "rollouts/*.parquet")
    ),
    *(
        Target(f"run/checkpoints/step-00001/{name}", (_RESUME, _RESUME, *_READ_RUN[4:6]))
        for name in ("trainer.pt", "trainer.pt", "config.json", "model.safetensors", "tokenizer*.json", "*.jinja")
    ),
    Target("run/rollouts", _READ_RUN),
    Target("run/checkpoints", _READ_RUN),
    *(Target(f"spider/{name}", _READ_SPIDER) for name in ("dev.json", "train_spider.json", "database/*/*.sqlite")),
    *(Target(f"prepared/{name}", _READ_PREPARED) for name in ("report.json", "*.parquet", "gold_zero_rows.json")),
    Target("prepared/database/*/*.sqlite", _READ_DATABASE),
    *(Target(f"medical/{name}", _READ_MEDICAL) for name in ("questions.parquet", "medical.sqlite")),
    *(
        Target(f"model/{name}", _READ_MODEL)
        for name in ("config.json", "config.json", "*.safetensors", "tokenizer*.json", "*.jinja", "generation_config.json")
    ),
    *(Target(name, tuple((*each, name) for each in _READ_SETTINGS)) for name in ("settings.toml", "settings.yaml")),
    Target("spider.zip", (("-m", "groundwire.domains.spider.prepare", "--source", "spider.zip", "--out", "out"),)),
)


def make_pristine(folder: Path) -> Path:
    """Fill ``folder`` with undamaged files of every kind: a run, data, a model, settings."""
    import torch

    from groundwire.domains.medical.loader import BUNDLED
    from groundwire.domains.spider.prepare import prepare
    from groundwire.train.local.grpo import GRPO, GRPOConfig
    from groundwire.train.policy import STARTER
    from groundwire.train.policy.model import load_policy

    folder.mkdir(parents=True, exist_ok=True)
    make_spider(folder / "spider", train=[TRAIN[0], *TRAIN], dev=[*DEV])
    shutil.make_archive(str(folder / "spider"), "zip", folder, "spider")
    prepare(folder / "spider", folder / "prepared")
    (folder / "prepared" / "gold_zero_rows.json").write_text('{"train": [], "dev": ["d1"]}')
    shutil.copytree(BUNDLED, folder / "medical")
    shutil.copytree(STARTER, folder / "model")
    (folder / "settings.toml").write_text(_SETTINGS)
    (folder / "settings.yaml").write_text(_SETTINGS.replace("=", ": "))
    command = ("-m", "groundwire.train.run", "--config", "settings.toml", "--data-dir", "prepared", "--steps", "1")
    result = programs.run(*command, folder=folder)
    assert result.returncode == 0, result.stderr
    (folder / "runs" / "latest").resolve().rename(folder / "run")
    shutil.rmtree(folder / "runs")
    model, _ = load_policy(STARTER)
    grpo = GRPO(model, GRPOConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grpo.optimizer.step()
    torch.save(grpo.state(), folder / "run" / "checkpoints" / "step-00001" / "trainer.pt")
    return folder


def cases(seed: int, pristine: Path, work: Path) -> Iterator[Case]:
    """Cases without end. Each has the folder ``work / N``, which is deleted when the next case is asked for."""
    source = random.Random(seed)
    for number in itertools.count():
        target = source.choice(TARGETS)
        folder = work / str(number)
        _copy(pristine, folder)
        file = source.choice(sorted(folder.glob(target.file)))
        damage = source.choice(_damages(file))
        command = source.choice(target.commands)
        description = f"{damage.__name__}, {file.relative_to(folder)}"
        detail = damage(file, source)
        yield Case(f"case {number} of seed {seed}: {description}{f' ({detail})' if detail else ''}", command, folder)
        shutil.rmtree(folder, ignore_errors=True)


def problem(case: Case, *, timeout_s: float = TIMEOUT_S) -> str:
    """Run the command; why it failed the case, or an empty text."""
    program = programs.Program(*case.command, folder=case.folder)
    deadline, memory_mb = time.monotonic() + timeout_s, 0
    while program.poll() is None and time.monotonic() < deadline and memory_mb < MAX_MEMORY_MB:
        memory_mb = max(memory_mb, _memory_mb(program.pid))
        time.sleep(0.02)
    if program.poll() is None:
        with suppress(AssertionError):
            program.wait(0)
        return f"more than {MAX_MEMORY_MB} MB" if memory_mb >= MAX_MEMORY_MB else f"no end after {timeout_s:g} s"
    result = program.wait(10)
    output = result.stdout + result.stderr
    if found := _CRASH.search(output):
        return f"{found[0]}:\n{output[-1500:]}"
    if result.returncode not in _STATUSES:
        return f"exit status {result.returncode}:\n{output[-1500:]}"
    if result.returncode and not output.strip():
        return f"exit status {result.returncode} without a message"
    if result.returncode and len(output) > MAX_OUTPUT:
        return f"{len(output)} characters of output:\n{output[:500]}"
    return ""


def _memory_mb(pid: int) -> int:
    with suppress(OSError, IndexError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return 0


def _copy(source: Path, target: Path) -> None:
    """A copy; large files, which no command changes in place, are links."""

    def copy_file(one: str, other: str) -> None:
        os.link(one, other) if os.path.getsize(one) > 1 << 20 else shutil.copy(one, other)

    shutil.copytree(source, target, copy_function=copy_file)


# -- damages of any file


Damage = Callable[[Path, random.Random], Any]


def _replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def cut(file: Path, source: random.Random) -> None:
    content = file.read_bytes()
    _replace(file, content[: source.randrange(len(content) + 1)])


def empty(file: Path, source: random.Random) -> None:
    _replace(file, b"")


def flipped_bytes(file: Path, source: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(source.choice((1, 3, 30))):
        if content:
            content[source.randrange(min(len(content), source.choice((100, 1 << 30))))] = source.randrange(256)
    _replace(file, bytes(content))


def random_bytes(file: Path, source: random.Random) -> None:
    _replace(file, source.randbytes(source.choice((10, 1000, 100_000))))


def deep_json(file: Path, source: random.Random) -> None:
    bracket = source.choice(("[", '{"a":'))
    _replace(file, (bracket * 200_000).encode())


def huge_json(file: Path, source: random.Random) -> None:
    _replace(file, b"[" + b"[]," * 60_000_000 + b"[]]")


def other_value(file: Path, source: random.Random) -> None:
    _replace(file, source.choice(("[]", "{}", "null", "3", '"x"', "NaN", "1" * 5000, '{"\\ud800": "\\ud800"}')).encode())


def a_folder(file: Path, source: random.Random) -> None:
    missing(file, source)
    file.mkdir()


def missing(file: Path, source: random.Random) -> None:
    shutil.rmtree(file) if file.is_dir() else file.unlink()


def a_file(folder: Path, source: random.Random) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"x")


def a_pipe(file: Path, source: random.Random) -> None:
    missing(file, source)
    os.mkfifo(file)


def endless(file: Path, source: random.Random) -> None:
    missing(file, source)
    file.symlink_to("/dev/zero")


def link_to_itself(file: Path, source: random.Random) -> None:
    missing(file, source)
    file.symlink_to(file.name)


_ANY: tuple[Damage, ...] = (cut, empty, flipped_bytes, random_bytes, a_folder, missing, a_pipe, endless, link_to_itself)


# -- damages by the file's kind


def other_json(file: Path, source: random.Random) -> str:
    """One value somewhere in a JSON file, or in a line of it, is another one."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = source.randrange(len(lines))
    value, detail = _other_values(json.loads(lines[number]), source)
    lines[number] = json.dumps(value)
    _replace(file, "\n".join([*lines, ""]).encode())
    return detail


def _values() -> list[Any]:
    return [
        *(None, True, -1, 0, 1, 3, 10**9, 10**30, 1e300, float("inf"), float("nan"), 0.5, "", "x", "\ud800", "../../x"),
        *([], {}, [None], {"": None}, [[]], ["a", 1], "y" * 100_000, [{}] * 10_000, "0" * 5000, {"x": {"y": [1]}}),
    ]


def _other_values(value: Any, source: random.Random) -> tuple[Any, str]:
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return source.choice(_values()), ""
    container, key = source.choice(places)
    if isinstance(container, dict) and source.random() < 0.15:
        del container[key]
        return value, f"without {key!r}"
    container[key] = source.choice(_values())
    return value, f"{key!r} is {container[key]!r:.30}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


_JSON_COLUMNS = ("reward_components", "task", "agent_steps", "call_rewards", "untrainable")


def other_column(file: Path, source: random.Random) -> str:
    """A column of a parquet file is missing, of another type, null or holds other values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        table = opened.read()
    name = source.choice(table.column_names)
    index, rows = table.column_names.index(name), len(table)
    kind = source.choice(("missing", "json", "values", "values", "one null", "no rows", "twice"))
    if kind == "missing":
        table = table.drop_columns([name])
    elif kind == "no rows":
        table = table.slice(0, 0)
    elif kind == "twice":
        table = table.append_column(name, table.column(name))
    elif kind == "one null":
        values = [None, *table.column(name).to_pylist()[1:]]
        table = table.set_column(index, name, pa.array(values, table.schema.field(name).type))
    elif kind == "json" and (known := [each for each in _JSON_COLUMNS if each in table.column_names]):
        name = source.choice(known)
        texts = []
        for text in table.column(name).to_pylist():
            value, kind = _other_values(json.loads(text), source)
            texts.append(json.dumps(value))
        if source.random() < 0.3:
            texts[0] = source.choice(("", "[", "[" * 100_000, "NaN", "\x00"))
            kind = repr(texts[0][:10])
        table = table.set_column(table.column_names.index(name), name, pa.array(texts))
    else:
        value = source.choice(["x", "", "[", 1, -1, 2**62, 0.5, float("nan"), [], [1], {"a": 1}, b"\xff", True])
        table = table.set_column(index, name, pa.array([value] * rows))
        kind = repr(value)
    file.unlink()
    pq.write_table(table, file)
    return f"{name}: {kind}"


def other_state(file: Path, source: random.Random) -> str:
    """A trainer.pt that torch can load, of another shape."""
    import torch

    state = torch.load(file, weights_only=True)
    kind = source.choice(("value", "value", "value", "tensor", "tensor", "no key", "other type"))
    if kind == "other type":
        state = source.choice([{}, [], None, 3, torch.zeros(2), {"optimizer": state}, "x"])
    elif kind == "no key":
        del state[source.choice(list(state))]
    elif kind == "tensor":
        moments = state["optimizer"]["state"][source.randrange(3)]
        name = source.choice(list(moments))
        wrong = [torch.zeros(3), torch.zeros(1).expand(10**12), torch.full((128,), torch.nan), "x", None, torch.eye(2) > 0]
        moments[name] = source.choice(wrong)
        kind = f"{name} is {moments[name]!s:.30}" if not torch.is_tensor(moments[name]) else f"{name} {moments[name].shape}"
    else:
        value = _as_lists(state["random"])
        state["random"] = value
        places = [place for place in _places(state) if not torch.is_tensor(place[0])]
        container, key = source.choice(places if source.random() < 0.5 else [place for place in places if place[1] != 1])
        container[key] = source.choice([each for each in _values() if not isinstance(each, str) or len(each) < 100])
        kind = f"{key!r} is {container[key]!r:.30}"
    file.unlink()
    torch.save(state, file)
    return kind


def _as_lists(value: Any) -> Any:
    return [_as_lists(each) for each in value] if isinstance(value, tuple) else value


TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ ('%0' ~ 10 ** 10 ~ 'd') % 1 }}",
    "{{ 'x'.ljust(10 ** 11) }}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 2) if n > 1 else '1' }}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% set ns = namespace(x='x' * 1000) %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ raise_exception('no') }}",
    "{{ messages[99].content }}{{ nothing.at.all }}",
    "{% include 'x' %}",
    "{% for a in",
    "",
    "no messages",
    "{{ '\ud83d\ude00' * 1000 }}\x00",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ range(99999) | list | string * 100000 }}",
    "{{ strftime_now('%c' * 10 ** 9) }}",
)


def other_template(file: Path, source: random.Random) -> str:
    """A chat template that loops, grows or is none."""
    text = source.choice(TEMPLATES)
    _replace(file, text.encode("utf-8", "surrogatepass"))
    return text[:60]


def other_settings(file: Path, source: random.Random) -> str:
    """Settings with one line that is wrong."""
    key = source.choice(("steps", "judge", "verl", "config", "model", "seed", "track", "agent_match", "\ud800", "a.b"))
    value = json.dumps(source.choice(_values()))
    if file.suffix == ".yaml":
        lines = (
            *("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b]\n" * 3, "&a [*a]"),
            *("track: &t [*t]", "? [a]\n: 1", "1: 2", "null: 1", "seed: !!python/object:os.system x", "a: " + "[" * 30_000),
            *("verl: &v {a: *v}", "seed: " + "9" * 5000, "seed: 2020-02-30", "steps: !!binary x", f"{key}: {value}"),
        )
    else:
        lines = (f"{key} = {value}", f"[{key}]\nx={value}", "a = " + "[" * 30_000, "seed = " + "9" * 5000, "seed = 2020-01-01")
    line = source.choice(lines)
    _replace(file, f"{source.choice(('', _SETTINGS))}\n{line}\n".encode("utf-8", "replace"))
    return line[:60]


def other_tensors(file: Path, source: random.Random) -> str:
    """A header of safetensors that is wrong."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header, detail = _other_values(header, source)
    text = json.dumps(header).encode()
    length = source.choice((len(text), len(text), len(text), 2**60, len(text) + 1))
    _replace(file, struct.pack("<Q", length) + text + content[8 + size :])
    return detail if length == len(text) else f"length {length}"


def other_database(file: Path, source: random.Random) -> str:
    """A database whose schema is unusual or wrong."""
    script = source.choice(
        (
            "DROP TABLE IF EXISTS pet; DROP TABLE IF EXISTS car;",
            "CREATE VIEW v AS SELECT * FROM v2; CREATE VIEW v2 AS SELECT * FROM v;",
            "CREATE TABLE \"a\nb\"(x); CREATE TABLE ''(\"\");",
            "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = 'CREATE TABLE x(' || hex(zeroblob(1000));",
            "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage = 99999;",
            "PRAGMA user_version=7; PRAGMA encoding='UTF-16';",
            "CREATE TABLE many(" + ",".join(f"c{number}" for number in range(1900)) + ");",
        )
    )
    content = file.read_bytes()
    _replace(file, content)
    with sqlite3.connect(file) as connection, suppress(sqlite3.Error):
        connection.executescript(script)
    connection.close()
    return script[:60]


def other_zip(file: Path, source: random.Random) -> str:
    """A zip with members that lead elsewhere, or that unpack to much more."""
    import zipfile

    kind = source.choice(("../x.sqlite", "/tmp/x.sqlite", "a" * 300 + "/dev.json", "dev.json/dev.json", "bomb"))
    memory = io.BytesIO(file.read_bytes())
    with zipfile.ZipFile(memory, "a", zipfile.ZIP_DEFLATED) as archive:
        if kind == "bomb":
            archive.writestr("spider/dev.json", b"[" + b" " * (300 << 20) + b"]")
        else:
            archive.writestr(kind, b"[]")
    _replace(file, memory.getvalue())
    return kind


_BY_SUFFIX: dict[str, tuple[Damage, ...]] = {
    ".json": (other_json, other_json, other_json, other_value, deep_json, huge_json),
    ".jsonl": (other_json, other_json, other_json, other_value, deep_json),
    ".parquet": (other_column, other_column, other_column, other_column),
    ".pt": (other_state, other_state, other_state),
    ".jinja": (other_template, other_template, other_template),
    ".toml": (other_settings, other_settings),
    ".yaml": (other_settings, other_settings),
    ".safetensors": (other_tensors, other_tensors),
    ".sqlite": (other_database, other_database),
    ".zip": (other_zip,),
}


def _damages(file: Path) -> tuple[Damage, ...]:
    if file.is_dir():
        return (missing, a_file, a_pipe, link_to_itself)
    return (source_damage := _BY_SUFFIX.get(file.suffix, ())) * (1 + len(_ANY) // (len(source_damage) or 1)) + _ANY


def main() -> None:
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--only", default="", help="expression that the description matches")
    options = parser.parse_args()
    failed = ran = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        pristine = make_pristine(Path(name) / "pristine")
        for case in itertools.islice(cases(options.seed, pristine, Path(name)), options.cases):
            if not re.search(options.only, case.description):
                continue
            began = time.monotonic()
            ran += 1
            if found := problem(case):
                failed += 1
                print(f"FAILED {case.description}\n    {' '.join(case.command)}\n    {found}\n", flush=True)
            elif time.monotonic() - began > 15:
                print(f"slow: {time.monotonic() - began:.0f} s, {case.description}, {' '.join(case.command)}", flush=True)
    print(f"{ran} cases, {failed} failed, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
