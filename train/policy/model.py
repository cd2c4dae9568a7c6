"""Makes, loads and saves policies, and says how they are computed; transformers and vLLM load the same folders."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from groundwire.tools.files import shorten_repr
from groundwire.tools.machine import address_space, processors
from groundwire.tools.secrets import say
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.policy.chat.template import check_template, is_trusted
from groundwire.train.policy.errors import ModelUnreadableError
from groundwire.train.policy.pretrained.locate import find_model, read_tokenizer
from groundwire.train.policy.pretrained.model_files import check_model_files, read_model

_LARGE = 20_000_000  # parameters of a model with which a CPU spends most of its time in matrix products
_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
_MAX_REASON = 300  # characters of a library's message


def keep_freed_memory() -> None:
    """Let the heap of this process keep freed memory, and grow by 256 MB at a time (glibc only).

    With matrices as small as the starter's, page faults on every allocation cost more than the arithmetic. With few
    addresses (``ulimit -v``) all threads share two heaps instead, each of which takes 64 MB of them.
    """
    options = [(-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)]  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
    if address_space() < math.inf:
        options = [(-8, 2)]  # M_ARENA_MAX
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (AttributeError, OSError):
        return
    for option, value in options:
        mallopt(option, value)


def load_policy(path: str | Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model (float32, evaluation mode, on the CPU) and the tokenizer of a folder; nothing is downloaded.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ModelUnreadableError: the model or the tokenizer cannot be loaded.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        problem = "config.json is missing; give a folder saved by transformers"
        raise FileNotFoundError(f"no checkpoint in {folder}: {problem}")
    what = "model"
    try:
        check_model_files(folder)
        model = read_model(folder)
        _check_end_tokens(model)
        what = "tokenizer"
        tokenizer = read_tokenizer(folder)
        what = "chat template"
        if tokenizer.chat_template and not is_trusted(tokenizer):
            check_template(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
    except (MemoryError, ImportError, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # the libraries raise many types for missing and damaged files
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust: no Exception
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(lines[: 1 + lines[0].endswith(":")])[:_MAX_REASON]
        if what == "tokenizer" and not (folder / "tokenizer.json").is_file():
            reason = "there is no tokenizer.json; save it there, too, with the tokenizer's save_pretrained"
        if what == "chat template":
            reason += "; correct it, or use another model"
        raise ModelUnreadableError(f"the {what} in {folder} cannot be loaded: {reason}") from error
    return model.eval(), tokenizer


def _check_end_tokens(model: Any) -> None:
    for config in (model.config, model.generation_config):
        ends = getattr(config, "eos_token_id", None)
        if not all(isinstance(end, int | None) for end in (ends if isinstance(ends, list) else [ends])):
            raise ValueError(f"eos_token_id is {shorten_repr(ends)}, no token's id")


def fitting_length(model: torch.nn.Module, max_model_len: int) -> int:
    """The smaller of ``max_model_len`` and the model's number of positions; a smaller one is reported on stderr.

    With ``longrope`` (Phi) the positions are those before another scale turns all keys, those in a cache excepted.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or max_model_len
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        positions = rope.get("original_max_position_embeddings") or positions
    if positions < max_model_len:
        message = f"model: it has {positions} positions, so max_model_len is {positions}, not {max_model_len}"
        say(message, err=True)
    return int(min(positions, max_model_len))


def key_value_bytes(shape: Any, size: int) -> int:
    """The keys and values of a token in all layers of a model of this Hugging Face config, numbers of ``size`` bytes.

    An upper bound for layers with a window or a state.
    """
    queries = getattr(shape, "num_attention_heads", None) or 1
    heads = getattr(shape, "num_key_value_heads", None) or queries
    head = getattr(shape, "head_dim", None) or shape.hidden_size // queries
    return int(2 * size * shape.num_hidden_layers * heads * head)


def check_device(device: str) -> None:
    """Raise :class:`ConfigError` if torch cannot use ``device`` on this machine; says if nobody has tried it yet."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch {torch.__version__} sees no GPU; use cpu")
    try:
        torch.zeros(1, device=device).item()  # the usable names depend on torch's build
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        message = f"device is {device!r}, which torch {torch.__version__} cannot use here; use cpu, cuda, mps or xpu"
        raise ConfigError(message) from error
    if not device.startswith(("cpu", "cuda")):
        say(f"note: nobody has trained or measured on device {device} yet: compare a step with cpu", err=True)


def bf16_is_faster(model: Any) -> bool:
    """Whether matrix products are faster in bfloat16: on CUDA, and for a large model on a CPU that computes them."""
    if model.device.type != "cpu":
        return bool(model.device.type == "cuda")
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not know them
    return _is_large_on_cpu(model) and any(capabilities.get(name) for name in _INSTRUCTIONS)


def sampling_threads(model: Any) -> int:
    """All of torch's threads for a large model on a CPU, else one: a second one would wait for the agents' core."""
    return all_threads() if _is_large_on_cpu(model) else 1


def all_threads() -> int:
    """Of torch, which counts the machine's cores, whatever share of them a container has."""
    return min(torch.get_num_threads(), processors())


def _is_large_on_cpu(model: Any) -> bool:
    return bool(model.device.type == "cpu") and model.num_parameters() >= _LARGE


class InitialState(NamedTuple):
    """A model with its tokenizer, and the trainer's state if they come from a checkpoint."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    state: dict[str, Any] | None = None
    note: str = ""
    """For the user: the damaged checkpoints that were renamed."""


def load_initial_state(
    config: RunConfig, run: RunDir, check_state: Callable[[Any, Any], None] = lambda _model, _state: None
) -> InitialState:
    """Load the model to ``config.device``. Damaged checkpoints are renamed, and the newest readable one is taken.

    ``check_state(model, state)`` raises ``ValueError`` for a trainer's state that does not belong to the model.

    Raises:
        ConfigError: the device or the model cannot be used.
        RunDamagedError: none of the run's checkpoints can be read.
    """
    check_device(config.device)
    unreadable: list[tuple[Path, RunDamagedError]] = []
    for checkpoint in reversed(run.checkpoints.paths()):
        try:
            model, tokenizer, state = _load_checkpoint(checkpoint, config.device, check_state)
        except RunDamagedError as error:
            unreadable.append((checkpoint, error))
            continue
        notes = []
        for damaged, reason in unreadable:
            kept = run.checkpoints.rename_damaged(damaged)
            notes.append(f"{reason}: going on from {checkpoint.name}, and {damaged.name} is kept as {kept.name}")
        return InitialState(model.to(config.device), tokenizer, state, "\n".join(notes))
    if unreadable:
        raise RunDamagedError(f"{unreadable[0][1]}, and there is no earlier checkpoint that can: start a new run")
    model, tokenizer = load_policy(find_model(config.model))
    return InitialState(model.to(config.device), tokenizer)


def load_start(config: RunConfig) -> LlamaForCausalLM:
    """The model that the run begins with, on ``config.device``."""
    return load_policy(find_model(config.model))[0].to(config.device)


def _load_checkpoint(
    folder: Path, device: str, check_state: Callable[[Any, Any], None]
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, dict[str, Any]]:
    try:
        model, tokenizer = load_policy(folder)
    except (FileNotFoundError, ModelUnreadableError) as error:
        raise RunDamagedError(str(error)) from error
    file = folder / "trainer.pt"
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        state = torch.load(file, map_location=device, weights_only=True)
        check_state(model, state)
        return model, tokenizer, state
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch, zipfile and pickle raise many types for a damaged file
        reason = str(error).partition(". ")[0].strip()[:_MAX_REASON] or type(error).__name__
        raise RunDamagedError(f"{file} cannot be loaded: {reason}") from error
