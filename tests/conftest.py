"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certifi
import fork_server
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# Importing torch, transformers and the agent frameworks makes a million objects that stay: looking through all of them
# for garbage, again and again, is a fifth of the time that collecting the tests takes.
gc.set_threshold(100_000, 50, 50)
# Two workers and what they start share two cores: threads that wait for each other only burn them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# LiteLLM, which Agent Lightning imports, would download a list of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# Programs that are not forked would compile the project again, each of them, and each run all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The user's token: a new one, for the tests and the programs that they start.
os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
# Each HTTP client reads the certificates of all authorities, for 20 ms. No test has a server with TLS: one will do.
_USERS_CERTIFICATES = "GROUNDWIRE_TEST_CERTIFICATES"
os.environ.setdefault(_USERS_CERTIFICATES, os.environ.get("SSL_CERT_FILE", ""))
_CERTIFICATE, _END, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
os.environ["SSL_CERT_FILE"] = os.path.join(tempfile.mkdtemp(), "ca.pem")
Path(os.environ["SSL_CERT_FILE"]).write_text(_CERTIFICATE + _END)
# Tests send Ctrl-C to what they start; a shell that starts pytest in the background has it ignored by all of them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on time: on a busy machine the first example of Hypothesis takes a second.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

WORDS = "database question query name select from where singer age count order by tool sql result correct the of a is"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from a process that has imported the tests and what they import."""
    fork_server.ensure_running("many")
    _compile_tests(config)  # while the server imports
    fork_server.draw_examples()
    server, address = fork_server.start_server_of_workers(config.args)
    config.add_cleanup(server.kill)
    for spec in specs:
        spec.python = f"{sys.executable} {fork_server.__file__} {address}"


def _compile_tests(config: pytest.Config) -> None:
    """Writes the compiled tests to files, which the workers read: to rewrite their asserts takes two seconds."""
    for argument in config.args:
        path = Path(argument.partition("::")[0])
        for file in path.rglob("test_*.py") if path.is_dir() else [path]:
            module = types.ModuleType(file.stem)
            module.__spec__ = importlib.util.spec_from_file_location(file.stem, file)
            module.__dict__["__builtins__"] = {}  # the compiled code fails at its first import
            with contextlib.suppress(Exception):
                config.pluginmanager.rewrite_hook.exec_module(module)


def pytest_collection_finish() -> None:
    """At its end the interpreter looks for garbage several times, for three seconds: not among what was imported."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is freed after the tests may still log an error, to the output of a test, which is closed."""
    logging.raiseExceptions = False


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """``shared_folder(name, fill)``: a folder of that name, filled once for all workers. Tests only read it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, fill: Callable[[Path], object]) -> Path:
        path, filled = root / name, root / f"{name}.filled"
        with FileLock(root / f"{name}.lock"):
            if not filled.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                fill(path)
                filled.touch()
        return path

    return folder


@pytest.fixture
def network() -> dict[str, str]:
    """The environment of programs that download something."""
    environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
    certificates = environment[_USERS_CERTIFICATES]
    return {**environment, "SSL_CERT_FILE": certificates} if certificates else environment


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The Python programs that the code under test starts are forked, too: they start in a tenth of a second."""
    monkeypatch.setattr(sys, "executable", fork_server.forked_python(tmp_path_factory.mktemp("bin")))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for vLLM's parameters."""
    module = types.SimpleNamespace(
        StructuredOutputsParams=lambda grammar: types.SimpleNamespace(grammar=grammar),
        RequestOutputKind=types.SimpleNamespace(FINAL_ONLY="once"),
    )
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(sampling_params=module))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)


@pytest.fixture(scope="session")
def tiny_policy():
    """(model, tokenizer): the project's architecture with random weights, in the project's own chat format."""
    torch = pytest.importorskip("torch")
    from dev.pretrain.model import new_policy
    from dev.pretrain.tokenizer import train_tokenizer

    torch.set_num_threads(1)
    tokenizer = train_tokenizer([WORDS] * 30, words=WORDS.split(), min_count=2)
    return new_policy(tokenizer, context=512, seed=1), tokenizer
