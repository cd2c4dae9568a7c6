"""Damages of files: general ones, and one for each kind of file. A damage changes a file and describes what it did."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import shutil
import sqlite3
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

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
    values = ("[]", "{}", "null", "3", '"x"', "NaN", "1" * 5000, '{"\\ud800": "\\ud800"}')
    _replace(file, source.choice(values).encode())


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
        huge, nans = torch.zeros(1).expand(10**12), torch.full((128,), torch.nan)
        wrong = moments[name] = source.choice([torch.zeros(3), huge, nans, "x", None, torch.eye(2) > 0])
        kind = f"{name} {wrong.shape}" if torch.is_tensor(wrong) else f"{name} is {wrong!s:.30}"
    else:
        state["random"] = [_as_lists(each) if source.random() < 0.5 else each for each in state["random"]]
        container, key = source.choice([*_places(state)])
        container[key] = source.choice([each for each in _values() if not isinstance(each, str) or len(each) < 100])
        kind = f"{key!r} is {container[key]!r:.30}"
    file.unlink()
    torch.save(state, file)
    return kind


def other_weights(file: Path, source: random.Random) -> str:
    """Weights that torch can load, of another shape."""
    import torch

    weights = torch.load(file, weights_only=True)
    name = source.choice(list(weights))
    wrong = [torch.zeros(3), torch.zeros(1).expand(10**12), "x", None, torch.eye(2) > 0, torch.zeros(2, 2)]
    weights[name] = source.choice(wrong)
    file.unlink()
    torch.save(source.choice([weights, weights, weights, [], None, {}, {"a": weights}]), file)
    return name


def _as_lists(value: Any) -> Any:
    return [_as_lists(each) for each in value] if isinstance(value, tuple) else value


TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
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
            "".join(f"a{n}: &a{n} {{{nine(f'*a{n - 1}' if n else 'x')}}}\n" for n in range(9)),
            *("track: &t [*t]", "? [a]\n: 1", "1: 2", "null: 1", "seed: !!python/object:os.system x"),
            *("verl: &v {a: *v}", "seed: " + "9" * 5000, "seed: 2020-02-30", "steps: !!binary x", f"{key}: {value}"),
            *("steps: !!timestamp x", "a: " + "[" * 30_000),
        )
    else:
        lines = (
            *(f"{key} = {value}", f"[{key}]\nx={value}", "a = " + "[" * 30_000),
            *("seed = " + "9" * 5000, "seed = 2020-01-01"),
        )
    line = source.choice(lines)
    _replace(file, f"{source.choice(('', file.read_text()))}\n{line}\n".encode("utf-8", "replace"))
    return line[:60]


def nine(value: str) -> str:
    return ", ".join(f"b{number}: {value}" for number in range(9))


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
            'CREATE TABLE "a\nb"(x); CREATE TABLE \'\'("");',
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
    with warnings.catch_warnings(), zipfile.ZipFile(memory, "a", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # two members of one name
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
    ".bin": (other_weights, other_weights),
    ".jinja": (other_template, other_template, other_template),
    ".toml": (other_settings, other_settings),
    ".yaml": (other_settings, other_settings),
    ".safetensors": (other_tensors, other_tensors),
    ".sqlite": (other_database, other_database),
    ".zip": (other_zip,),
}


def damages(file: Path) -> tuple[Damage, ...]:
    if file.is_dir():
        return (missing, a_file, a_pipe, link_to_itself)
    return (source_damage := _BY_SUFFIX.get(file.suffix, ())) * (1 + len(_ANY) // (len(source_damage) or 1)) + _ANY
