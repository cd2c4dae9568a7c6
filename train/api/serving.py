"""Serves a trained model as an OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import CommandError, check_layer, named_layer
from groundwire.tools.http.listening import listen_problem
from groundwire.tools.secrets import say

if TYPE_CHECKING:
    from groundwire.train.policy.engine import LocalEngine

_MAX_MODEL_LEN = 4096


class ServedModel:
    """A model's endpoint, served by a thread of this process until :meth:`close`; also a context manager."""

    def __init__(self, loop: Any, server: Any, engine: LocalEngine, folder: Path) -> None:
        self._loop, self._server, self._engine = loop, server, engine
        self.folder = folder
        """The model's folder."""
        self.model = str(server.model_name)
        """The name of the model in replies."""
        self.base_url = f"{server.url}/v1"
        """For OpenAI's clients. Anthropic's take it without the ``/v1``."""
        self.api_key = str(server.token)

    def close(self) -> None:
        """End the requests that are running, and stop."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.stop(self._server.stop())
            self._engine.close()

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServedModel {self.folder} at {self.base_url}>"


@named_layer("train")
def serve(
    checkpoint: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    device: str = "cpu",
    tool_format: str | None = None,
    token_file: str | Path | None = None,
) -> ServedModel:
    """Serve a model as an OpenAI-compatible endpoint, as ``groundwire serve`` does; returns at once.

    Args:
        checkpoint: a run directory (its newest checkpoint), a checkpoint, or a folder in Hugging Face's format.
        host: the address to listen on; any but this machine's own needs a token.
        port: the port; 0 takes any free one.
        served_model_name: requests for another model are refused. Without it, any name is accepted.
        max_model_len: tokens of prompt and reply together. Default: that of the run, else 4096.
        device: cpu, cuda, mps or xpu.
        tool_format: how the model writes tool calls, such as hermes; by default as its chat template does.
        token_file: a file with the endpoint's API key. Without it: GROUNDWIRE_TOKEN, else the user's own token.

    Returns:
        The running server with its ``base_url`` and ``api_key``: a context manager, or :meth:`ServedModel.close` it.

    Raises:
        groundwire.tools.errors.UserError: the model cannot be loaded, or the address cannot be used.
    """
    import asyncio

    from groundwire.tools.http.access_token import access_token, check_listen, given_token
    from groundwire.tools.startup import fast_import
    from groundwire.tools.terminal import spinner
    from groundwire.train.job.trained_model import trained_model
    from groundwire.train.policy.pretrained.locate import find_model

    check_layer("torch")
    check_listen(host, given_token(token_file))
    token = access_token(token_file)
    trained = trained_model(checkpoint)
    with spinner("reading the model"):
        folder = find_model(trained[0] if trained else checkpoint)
    if max_model_len is None and trained:
        max_model_len = trained[1].config().get("max_model_len")
    with spinner("starting"), fast_import():
        from groundwire.train.policy.engine import LocalEngine
    from groundwire.train.algorithms.prompt_scores import PromptScores
    from groundwire.train.policy.chat.tool_formats import FORMATS
    from groundwire.train.policy.model import check_device, fitting_length, load_policy
    from groundwire.train.policy.server import PolicyServer
    from groundwire.train.rollouts.event_loop import EventLoopThread

    if tool_format is not None and tool_format not in FORMATS:
        raise CommandError(f"tool format {tool_format!r} is unknown; known: {', '.join(FORMATS)}")
    check_device(device)
    model, tokenizer = load_policy(folder)
    if not tokenizer.chat_template:
        say(
            f"note: {folder} has no chat template, so only completions of plain prompts work: for chats use an "
            "instruct model, or set its chat_template",
            err=True,
        )
    length = fitting_length(model, max_model_len or _MAX_MODEL_LEN)
    engine = LocalEngine(model.to(device), tokenizer, max_model_len=length)
    name, any_model = served_model_name or folder.name, served_model_name is None
    address: dict[str, Any] = {"host": host, "port": port, "token": token}
    score = PromptScores(folder, device)
    server = PolicyServer(engine, **address, model_name=name, any_model=any_model, tool_format=tool_format, score=score)
    loop = EventLoopThread(asyncio.new_event_loop(), max_blocked_s=float("inf"))
    loop.start()
    try:
        loop.call(server.start())
    except BaseException as error:
        loop.stop(server.stop())
        engine.close()
        if isinstance(error, OSError):
            raise CommandError(listen_problem(host, port, error, "give another one, or 0 for any free port")) from error
        raise
    return ServedModel(loop, server, engine, folder)
