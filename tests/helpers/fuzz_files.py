"""Damage the files that commands read, and run these commands: each must end in a sentence.

``python tests/helpers/fuzz_files.py --seed 1 --cases 100`` prints the failures and a count. A failure is a traceback, a
crash,
an exit status that no command has, too much output, time or memory.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import programs
from bird_folder import make_bird
from file_damage import damages
from spider_folder import DEV, TRAIN, make_spider
from sqlite_folder import make_folder

TIMEOUT_S = 300.0
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
    ("-m", "groundwire.train.rescore", "run", "--reward", "executes"),
)
_READ_SPIDER = (
    ("-m", "groundwire.train.audit", "--data-dir", "spider"),
    ("-m", "groundwire.domains.spider.prepare", "--source", "spider", "--out", "out"),
    ("-m", "groundwire.train.run", "--data-dir", "spider", "--print-config"),
)
_AUDIT = ("-m", "groundwire.train.audit", "--data-dir")
_READ_PREPARED = (
    (*_AUDIT, "prepared"),
    ("-m", "groundwire.train.run", "--data-dir", "prepared", "--print-config"),
    ("-m", "groundwire.domains.spider.prepare", "--source", "spider", "--out", "prepared"),
)
_MEDICAL = ("medical", "medical-csv", "medical-json", "medical-jsonl")
_TRAIN = ("-m", "groundwire.train.run", "--config", "settings.toml", "--data-dir", "prepared", "--steps", "1")
_EVALUATE = ("-m", "groundwire.train.evaluate", "--val-tasks", "1", "--data-dir", "prepared", "max_tokens=8")
_READ_SETTINGS = (
    ("-m", "groundwire.train.run", "--print-config", "--config"),
    ("-m", "groundwire.train.evaluate", "--val-tasks", "1", "--config"),
)
_READ_DATABASE = (("-m", "groundwire.tools.mcp_sql", "--database", "prepared/database"), (*_AUDIT, "prepared"))


def _read_medical(folder: str) -> tuple[tuple[str, ...], ...]:
    return ((*_AUDIT, folder, "--domain", "medical", "--limit", "4"),)


def _read_domain(domain: str) -> tuple[tuple[str, ...], ...]:
    return (
        (*_AUDIT, domain, "--domain", domain, "--limit", "4"),
        ("-m", "groundwire.domains.prepare", "--domain", domain, "--source", domain, "--out", "out"),
    )


def _read_model(folder: str) -> tuple[tuple[str, ...], ...]:
    return (
        ("-m", "groundwire.train.doctor", "--model", folder),
        (*_TRAIN, "--dev", "--model", folder),
        (*_EVALUATE, "--model", folder),
    )


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
    Target("run/report*", (("-m", "groundwire.train.report", "run"),)),
    Target("run/.lock", (_RESUME,)),
    Target("runs", (_TRAIN,)),
    Target("evaluations", (_EVALUATE,)),
    *(Target(f"spider/{name}", _READ_SPIDER) for name in ("*.json", "*.json", "database/*/*.sqlite")),
    *(Target(f"prepared/{name}", _READ_PREPARED) for name in ("report.json", "*.parquet", "*.parquet", "database")),
    Target("prepared/database/*/*.sqlite", _READ_DATABASE),
    *(Target(f"{folder}/*", _read_medical(folder)) for folder in _MEDICAL),
    *(Target(f"sqlite/{name}", _read_domain("sqlite")) for name in ("questions.jsonl", "*.sqlite")),
    *(
        Target(f"bird/{name}", _read_domain("bird"))
        for name in ("dev/dev.json", "train/train.json", "dev/*/*/*.sqlite")
    ),
    *(
        Target(f"model/{name}", _read_model("model"))
        for name in ("config.json", "config.json", "*.safetensors", "tokenizer*.json", "*.jinja", "generation*.json")
    ),
    *(Target(f"bin/{name}", _read_model("bin")) for name in ("config.json", "pytorch_model.bin")),
    *(Target(name, tuple((*each, name) for each in _READ_SETTINGS)) for name in ("settings.toml", "settings.yaml")),
    Target("spider.zip", (("-m", "groundwire.domains.spider.prepare", "--source", "spider.zip", "--out", "out"),)),
)


def make_pristine(folder: Path) -> Path:
    """Fill ``folder`` with undamaged files of every kind: a run, data, a model, settings."""
    import torch

    from groundwire.domains.medical import BUNDLED
    from groundwire.domains.spider.prepare import prepare
    from groundwire.train.local.grpo import GRPO, GRPOConfig
    from groundwire.train.policy import STARTER
    from groundwire.train.policy.model import load_policy
    from groundwire.train.policy.pretrained.model_files import save_policy

    folder.mkdir(parents=True, exist_ok=True)
    make_spider(folder / "spider", train=[TRAIN[0], *TRAIN], dev=[*DEV])
    shutil.make_archive(str(folder / "spider"), "zip", folder, "spider")
    prepare(folder / "spider", folder / "prepared")
    make_bird(folder / "bird")
    make_folder(folder / "sqlite")
    shutil.copytree(BUNDLED, folder / "medical")
    for name in _MEDICAL[1:]:
        _write_questions(folder / "medical", folder / name, name.partition("-")[2])
    shutil.copytree(STARTER, folder / "model")
    (folder / "settings.toml").write_text(_SETTINGS)
    (folder / "settings.yaml").write_text(_SETTINGS.replace("=", ": "))
    result = programs.run(*_TRAIN, folder=folder)
    assert result.returncode == 0 or "nothing was trained" in result.stdout, result.stderr
    (folder / "runs" / "latest").resolve().rename(folder / "run")
    (folder / "runs" / "latest").unlink()
    for name in ("evaluations", "run/report"):
        (folder / name).mkdir()
    (folder / "run" / "report.html").touch()
    model, tokenizer = load_policy(STARTER)
    save_policy(model, tokenizer, folder / "bin")
    (folder / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    grpo = GRPO(model, GRPOConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grpo.optimizer.step()
    torch.save(grpo.state(), folder / "run" / "checkpoints" / "step-00001" / "trainer.pt")
    return folder


def _write_questions(source: Path, target: Path, kind: str) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(source / "questions.parquet") as file:
        rows = [{name: row[name] for name in ("question", "answer")} for row in file.read().to_pylist()[:40]]
    target.mkdir()
    shutil.copy(source / "medical.sqlite", target)
    questions = target / f"questions.{kind}"
    if kind == "csv":
        with questions.open("w", newline="") as text:
            writer = csv.DictWriter(text, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        questions.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))


def cases(seed: int, pristine: Path, work: Path) -> Iterator[Case]:
    """Cases without end. Each has the folder ``work / N``, which is deleted when the next case is asked for."""
    source = random.Random(seed)
    for number in itertools.count():
        target = source.choice(TARGETS)
        folder = work / str(number)
        _copy(pristine, folder)
        file = source.choice(sorted(folder.glob(target.file)))
        damage = source.choice(damages(file))
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
    result = program.wait(600)
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
                print(f"slow: {time.monotonic() - began:.0f} s, {case.description}, {' '.join(case.command)}")
    print(f"{ran} cases, {failed} failed, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
