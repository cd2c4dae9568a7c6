"""A training run from its settings to its summary, for the command ``groundwire run`` and the function ``fit``.

Heavy packages are imported after the settings are checked.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire import rewards
from groundwire.tools.errors import CommandError, check_trainer
from groundwire.tools.files import read_json
from groundwire.tools.secrets import mask_secrets, masked_values
from groundwire.tools.startup import fast_import
from groundwire.tools.terminal import spinner
from groundwire.train.api.evaluation import Endpoint, upstream_of
from groundwire.train.api.resume import (
    check_continuation,
    config_for_resume,
    finished,
    parts_of,
    store_settings,
    with_resume_hint,
)
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.artifacts.summary import summarize
from groundwire.train.artifacts.tracking import logged_in
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.published import differences
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import LOGGER
from groundwire.train.job.prepare import (
    Job,
    Objects,
    check_store_settings,
    default_prompts,
    default_trainer,
    prepare,
    relative_path,
    resolve_domain,
    resolve_path,
)

if TYPE_CHECKING:
    from rich.console import Console

    from groundwire.train.local.trainer import LocalTrainer

__all__ = ["format_config", "import_trainer", "make_job", "nothing_left", "train"]

_STARTER_NOTES = {
    "sql": "The starter is a toy policy that stopped learning early on purpose, so that reinforcement learning has "
    "room. It was made for English questions, SQL, and prompts of up to 2,000 tokens. The bundled validation databases "
    "are new to it but generated; on real Spider it scores near zero.",
    "prose": "The starter is a toy policy that knows nothing but SQL over other databases: it writes no prose, and its "
    "reward says nothing of a real model's. This run shows that everything works; give --model a model that can write.",
}
"""What a reader of the starter's results needs to know, by the form of the domain's answers."""

_VARIANTS = (
    "reward: in training a query must also be right on variants of its database; validation counts the database alone"
)


def make_job(
    given: Mapping[str, Any],
    *,
    resumed: RunDir | None = None,
    objects: Objects | None = None,
    dev: bool = False,
    own_model: bool = True,
) -> Job:
    """Check the ``given`` settings, which a file, a preset or the ``resumed`` run completes, and load the data.

    Without ``own_model`` an endpoint has the model. Raises errors derived from
    :class:`groundwire.tools.errors.UserError`.
    """
    check_trainer()
    objects = objects or Objects()
    given = with_file(dict(given))
    given |= {
        name: resolve_path(given[name]) for name in ("model", "data_dir", "gold_trust", "token_file") if name in given
    }
    if "domain" in given:
        given["domain"] = resolve_domain(given["domain"])
    if resumed is None:
        local = dev or bool(objects.names())
        given.setdefault("trainer", default_trainer(given.get("config"), device=given.get("device"), dev=local))
        config = _with_usable_trackers(resolve(given.pop("config", None) or "fast", **given), given)
    else:
        config = config_for_resume(resumed, given, objects=objects.names())
    check_store_settings(config.external_store_address, config.token_file, config.store_wait_s)
    job = _with_gold_trust(prepare(config, own_model=own_model, objects=objects))
    if not job.data.train or not job.data.validation:
        empty = "training" if not job.data.train else "validation"
        raise CommandError(f"{job.data.source}: no {empty} tasks are left; the run needs some of both")
    if rewards.has_variants(job.reward):
        job = replace(job, notes=[*job.notes, _VARIANTS])
    return job if resumed is None else check_continuation(resumed, job)


def _with_gold_trust(job: Job) -> Job:
    if (file := job.config.gold_trust) is None:
        return job
    data, note = job.domain.with_gold_trust(job.data, Path(file), seed=job.config.seed)
    return replace(job, data=data, notes=[*job.notes, f"gold trust: {note}"])


def _with_usable_trackers(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """A preset's trackers are used if somebody is logged in; a tracker that was ``given`` is checked later."""
    if given.get("track") is not None or LOGGER in (given.get("verl") or {}):
        return config
    return config.model_copy(update={"track": [name for name in config.track if logged_in(name)]})


def train(job: Job, resumed: RunDir | None, shown: Console, endpoint: Endpoint | None = None) -> RunDir:
    """Train, show the progress and the summary on ``shown``, and return the run, which has all results.

    An ``endpoint`` has the model whose prompts ``--trainer gepa`` optimises; the other trainers have none.
    Raises errors derived from :class:`groundwire.tools.errors.UserError`; one that ends training says how to continue.
    """
    config = job.config
    if config.trainer == "verl":
        from groundwire.train.verl import launch

        with spinner("starting"):
            launch.check(config, job.data)  # before the run directory is made
    if config.trainer == "gepa":
        _check_gepa(config)
    run = resumed or RunDir.create(
        config.output_dir, backend=config.backend, domain=job.domain.name, config=_stored_config(job, endpoint)
    )
    with run.lock():
        if resumed is not None:
            store_settings(run, job)
        shown.print(f"run:  {run.path}", markup=False)
        with with_resume_hint(run, fit=bool(job.objects.names())):
            if config.trainer == "gepa":
                summary = _optimise_prompts(job, run, shown, endpoint)
            else:
                summary = _train_verl(job, run, shown) if config.trainer == "verl" else _train_local(job, run, shown)
    from groundwire.train.cli.progress import show_summary

    if config.trainer == "gepa":
        shown.print(f"the best prompts are in {relative_path(run.path)}/prompts.json", markup=False)
    show_summary(shown, summary, relative_path(run.path), job.domain)
    return run


def nothing_left(job: Job, run: RunDir) -> str:
    """A message if the resumed run has no step left, else an empty text."""
    if job.config.trainer == "gepa":
        return _prompts_are_optimised(job, run)
    if not finished(run, job.config):
        return ""
    with run.lock():
        if job.config.trainer == "local":
            with spinner("reading the newest checkpoint"), fast_import():
                from groundwire.train.policy.model import load_initial_state

                note = load_initial_state(job.config, run).note
            if note:  # the newest checkpoint that can be read is older
                print(f"note: {note}", file=sys.stderr)
                return ""
        if not run.has_final_files():  # killed after its last step
            _conclude(job, run)
    return finished(run, job.config)


def _prompts_are_optimised(job: Job, run: RunDir) -> str:
    """A message if the run has used its budget and written its prompts, else an empty text."""
    file = run.path / "gepa.json"
    try:
        used = int(read_json(file)["rollouts"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if used < job.config.prompt_budget:
        return ""
    return f"the budget of {used} rollouts is used, and the best prompts are in {relative_path(run.path)}/prompts.json"


@cache
def import_trainer() -> type[LocalTrainer]:
    """The local trainer. It is imported once with the garbage collector off."""
    with spinner("starting"), fast_import():
        from groundwire.train.cli import progress  # noqa: F401
        from groundwire.train.local.trainer import LocalTrainer
    return LocalTrainer


def _stored_config(job: Job, endpoint: Endpoint | None) -> dict[str, Any]:
    objects = job.objects.names()
    stored = job.config.to_dict() | ({"objects": objects} if objects else {}) | {"parts": parts_of(job)}
    return stored | ({"base_url": endpoint.base_url} if endpoint else {})


def _train_local(job: Job, run: RunDir, shown: Console) -> dict[str, Any]:
    trainer = import_trainer()
    from groundwire.train.cli.progress import ProgressDisplay
    from groundwire.train.local.graceful_shutdown import GracefulShutdown

    with GracefulShutdown() as shutdown:
        try:
            with ProgressDisplay(shown, job.config.steps) as display:
                trainer(
                    job.config,
                    data=job.data,
                    domain=job.domain,
                    backend=job.backend,
                    reward=job.reward,
                    run=run,
                    callback=display,
                    shutdown=shutdown,
                ).train()
        finally:
            with shutdown.critical_section("writing the summary"):
                summary = _conclude(job, run)
    return summary


def _train_verl(job: Job, run: RunDir, shown: Console) -> dict[str, Any]:
    from groundwire.train.cli.progress import ProgressDisplay
    from groundwire.train.verl import launch

    try:
        launch.train(job.config, job.data, run, ProgressDisplay(shown, job.config.steps).on_note)
    finally:
        summary = _conclude(job, run)
    return summary


def _optimise_prompts(job: Job, run: RunDir, shown: Console, endpoint: Endpoint | None) -> dict[str, Any]:
    with spinner("starting"), fast_import():
        from groundwire.train.cli.progress import ProgressDisplay
        from groundwire.train.gepa.trainer import PromptTrainer

    config, upstream = job.config, upstream_of(endpoint, job.config)
    own = default_prompts(job.backend, job.view.answers.name)
    try:
        with ProgressDisplay(shown, 1) as display:
            PromptTrainer(
                config,
                data=job.data,
                domain=job.domain,
                backend=job.backend,
                reward=job.reward,
                run=run,
                callback=display,
                prompts={**own, **config.prompts},
                upstream=upstream,
            ).train()
    finally:
        summary = _conclude(job, run)
    return summary


def _conclude(job: Job, run: RunDir) -> dict[str, Any]:
    """Write the summary, the curve and all rollouts of a run that ended in any way; returns the summary."""
    from groundwire.train.evaluation.run_reader import paired_changes, settings_changes
    from groundwire.train.report.charts import draw_curve

    if job.config.trainer == "verl":
        from groundwire.train.verl import launch

        launch.collect(run)
    if warning := job.databases.warning():
        print(f"warning: {warning}", file=sys.stderr)
    if not (metrics := run.metrics()):
        return {}
    note = _STARTER_NOTES[job.view.answers.name] if job.config.model == "starter" else ""
    summary = summarize(run, job.config, job.data.source, note=note)
    with suppress(RunDirError):  # a validation cannot be read: the means in the metrics remain
        for name, change in paired_changes(run).items():
            summary[name] |= change if "after" in summary[name] else {}
    if warning:
        summary["warning"] = warning
    summary["resumed"] = settings_changes(run)
    run.write_json("summary.json", summary)
    with spinner("writing rollouts.parquet and the curve"):
        damaged = run.merge_rollouts()
        draw_curve(metrics, run.path / "curve.png")
    for file in damaged:
        print(f"warning: {file}, and is left out", file=sys.stderr)
    return summary


def _check_gepa(config: RunConfig) -> None:
    """Raise :class:`ConfigError` if ``--trainer gepa`` lacks its package or a reflection model."""
    if importlib.util.find_spec("gepa") is None:
        raise ConfigError("--trainer gepa: its package is not installed: pip install -e '.[gepa]' in a clone")
    if not config.reflection_model:
        raise ConfigError(
            "--trainer gepa needs a model that writes prompts: --reflection-model NAME, as LiteLLM names it, or with "
            "--reflection-base-url URL a model of that endpoint"
        )
    if config.reflection_base_url and not config.reflection_base_url.startswith(("http://", "https://")):
        raise ConfigError(f"reflection_base_url is {config.reflection_base_url!r}; it must be like http://HOST:PORT/v1")


def format_config(job: Job, run_dir: str, *, diff: bool = False) -> str:
    """Every setting as JSON; with verl its whole configuration as YAML. Raises :class:`ConfigError`.

    With ``diff`` it is what differs from the published recipe.
    """
    if diff:
        return "\n".join(_differences(job.config)) or "no setting differs from the published recipe"
    if job.config.trainer != "verl":
        return json.dumps(masked_values(job.config.to_dict()), indent=2)
    from groundwire.train.verl.hydra_config import compose_for_run

    composed, _ = compose_for_run(job.config, job.data, run_dir)
    from omegaconf import OmegaConf

    return mask_secrets(OmegaConf.to_yaml(composed, resolve=True))


def _differences(config: RunConfig) -> list[str]:
    if config.trainer != "verl":
        return differences(config)
    from groundwire.train.verl.hydra_config import count_gpus, flat_config

    return differences(config, flat_config(config, n_gpus=max(1, count_gpus())))
