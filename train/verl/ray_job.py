"""What verl's Ray job needs: a number of its own, and in its processes the environment and the user's keys.

Ray gives the processes that it starts on other hosts the environment of ``ray start`` there, without the keys of the
trainer's shell. Ray's own way, ``runtime_env.env_vars``, would show them: verl prints it, and Ray writes it to its logs
and its dashboard. So the trainer's process puts them into the key-value store of Ray's head, which is in memory, and
each process reads them there before it does anything else. They are deleted when the run ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from groundwire.tools.secrets import say

SETUP_HOOK = f"{__name__}.read_variables"
"""The function that Ray calls in each process of the job, for ``runtime_env.worker_process_setup_hook``."""
RUN = "GROUNDWIRE_RAY_RUN"
"""The environment variable with the run, under which the variables are kept."""
_PREFIXES = ("WANDB_", "HF_", "HUGGING_FACE_", "SWANLAB_", "OPENAI_", "GROUNDWIRE_JUDGE_")
_SUFFIX = "_API_KEY"  # of the providers that LiteLLM calls for a judge
_NAMESPACE = b"groundwire"
_WAIT_S = 30.0


def environment(run_dir: str, trackers: Sequence[str]) -> dict[str, str]:
    """Environment variables for verl's processes; the user's values win, but for the import path and the log file."""
    # Here, because Ray's processes import this module before anything else.
    from groundwire.tools.startup import USERS_PYTHON_PATH, child_python_path
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.artifacts.tracking import TENSORBOARD_FOLDER, wandb_environment
    from groundwire.train.config.verl_names import ENGINE_VENDOR

    defaults = {
        "TENSORBOARD_DIR": f"{run_dir}/{TENSORBOARD_FOLDER}",
        "VERL_ENGINE_VENDOR": ENGINE_VENDOR,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # 1 compiles kernels for minutes at vLLM's first start
        **(wandb_environment(RunDir(Path(run_dir))) if "wandb" in trackers else {}),
    }
    return {
        "PYTHONPATH": child_python_path(),
        USERS_PYTHON_PATH: os.environ.get("PYTHONPATH", ""),
        "VERL_FILE_LOGGER_PATH": f"{run_dir}/verl.jsonl",
        RUN: run_dir,
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
    }


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that processes on other hosts get: of trackers, model hubs, model providers and the judge."""
    return {
        name: value
        for name, value in environment.items()
        if value and (name.startswith(_PREFIXES) or name.endswith(_SUFFIX))
    }


def read_variables() -> None:
    """Set the run's variables in this process of Ray's. A variable that the host has stays as it is."""
    from ray.experimental.internal_kv import _internal_kv_get

    key, deadline = os.environ.get(RUN, "").encode(), time.monotonic() + _WAIT_S
    # Ray starts the first processes while the trainer's process still connects.
    while (stored := _internal_kv_get(key, namespace=_NAMESPACE)) is None:
        if time.monotonic() > deadline:
            say("warning: the run's environment variables (keys, hubs) did not arrive here", err=True)
            return
        time.sleep(0.1)
    for name, value in json.loads(stored).items():
        os.environ.setdefault(name, value)


@contextmanager
def ray_job(run: str) -> Iterator[None]:
    """The Ray that starts inside of the block has its own job number, and the variables of ``run`` on all hosts."""
    import ray

    from groundwire.train.verl.patches import patched  # not in Ray's processes, which import this module first

    with (
        patched("ray.init", lambda rays: partial(_init_with_variables, run, rays)),
        patched("state.next_job_id", lambda rays: partial(_unique_job_id, rays)),
    ):
        try:
            yield
        finally:
            if ray.is_initialized():
                from ray.experimental.internal_kv import _internal_kv_del

                with suppress(Exception):  # Ray itself has failed, and its memory is gone
                    _internal_kv_del(run.encode(), namespace=_NAMESPACE)


def _init_with_variables(run: str, init: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    context = init(*arguments, **options)
    from ray.experimental.internal_kv import _internal_kv_put

    values = json.dumps(forwarded_variables(os.environ)).encode()
    _internal_kv_put(run.encode(), values, overwrite=True, namespace=_NAMESPACE)
    return context


def _unique_job_id(next_job_id: Callable[[], Any]) -> Any:
    """This process's id as the number of the first job, which has number 1 in every Ray."""
    from ray import JobID

    job_id = next_job_id()
    return JobID.from_int(os.getpid()) if job_id == JobID.from_int(1) else job_id
