"""A trained model is served as an OpenAI-compatible endpoint, and other programs can load its folder."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from programs import Program, until

from groundwire.tools.errors import UserError
from groundwire.tools.http.access_token import access_token, token_place
from groundwire.train import serve
from groundwire.train.api.serving import ServedModel
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.policy import STARTER
from groundwire.train.policy.engine import SWITCH_INTERVAL_S

ASK = [{"role": "user", "content": "How many singers are there?"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose newest checkpoint is the starter."""
    config = resolve("fast", max_model_len=700)
    run = RunDir.create(tmp_path_factory.mktemp("runs"), backend="b", domain="d", config=config.to_dict())
    (run.path / "checkpoints" / "step-00001").mkdir(parents=True)
    shutil.copytree(STARTER, run.path / "checkpoints" / "step-00002")
    return run


@pytest.fixture(scope="module")
def served(run: RunDir) -> Iterator[ServedModel]:
    with serve(run.path) as server:
        yield server


def test_an_app_calls_the_newest_checkpoint_of_a_run_under_any_name_and_api(served: ServedModel, run: RunDir) -> None:
    assert served.folder == run.path / "checkpoints" / "step-00002"
    client = openai.OpenAI(base_url=served.base_url, api_key=served.api_key)
    reply = client.chat.completions.create(model="gpt-5-mini", messages=ASK, temperature=0, max_tokens=8)  # type: ignore[arg-type]
    text = reply.choices[0].message.content
    assert text
    assert reply.model == "step-00002"
    stream = client.chat.completions.create(model="x", messages=ASK, temperature=0, max_tokens=8, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    response = client.responses.create(model="gpt-5", input=ASK[0]["content"], temperature=0, max_output_tokens=8)
    assert response.output_text == text
    again = client.responses.create(model="gpt-5", input="And now?", previous_response_id=response.id, temperature=0)
    assert again.output_text
    for base_url in (served.base_url, served.base_url.removesuffix("/v1")):
        claude = anthropic.Anthropic(base_url=base_url, api_key=served.api_key)
        message = claude.messages.create(
            model="claude",
            messages=ASK,  # type: ignore[arg-type]
            max_tokens=8,
            extra_body={"temperature": 0},
        )
        assert message.content[0].text == text  # type: ignore[union-attr]
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ("step-00002", 700)  # type: ignore[attr-defined]


def test_a_request_needs_the_token(served: ServedModel) -> None:
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"X-Api-Key": "wrong"}, 401),
        ({"Authorization": f"Bearer {served.api_key}"}, 200),
        ({"X-Api-Key": served.api_key}, 200),
    ):
        body = {"messages": ASK, "max_tokens": 1}
        reply = httpx.post(f"{served.base_url}/chat/completions", json=body, headers=headers, timeout=600)
        assert reply.status_code == status
    assert served.api_key == access_token()
    assert served.api_key not in repr(served)


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path, served: ServedModel) -> None:
    (tmp_path / "config.json").write_text("{}")
    port = int(served.base_url.split(":")[-1].partition("/")[0])
    for checkpoint, options, message in (
        (
            "no/such/run",
            {},
            "no model in no/such/run: there is no such file or folder; give starter, smollm2, a GGUF file",
        ),
        ("no/such", {}, "no model no/such: no such folder, and it is not in the hub's cache"),
        (tmp_path, {}, "its config.json has no model_type"),
        ("starter", {"host": "0.0.0.0"}, "listening on 0.0.0.0 needs a token"),
        ("starter", {"port": port}, f"port {port} on 127.0.0.1 is in use"),
        ("starter", {"device": "tpu"}, "device is 'tpu'"),
        ("starter", {"tool_format": "xml"}, "tool format 'xml' is unknown; known: hermes, qwen3_xml, qwen3_coder, "),
    ):
        with pytest.raises(UserError) as raised:
            serve(checkpoint, **options)  # type: ignore[arg-type]
        assert message in str(raised.value)


def test_a_model_without_a_chat_template_serves_plain_prompts_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(STARTER, tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    with serve(tmp_path / "plain") as server, openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        assert "has no chat template, so only completions of plain prompts work" in capsys.readouterr().err
        reply = client.completions.create(model="m", prompt="SELECT", max_tokens=8)
        assert reply.usage
        assert reply.usage.completion_tokens >= 1
        with pytest.raises(openai.BadRequestError, match="the model has none: use an instruct model"):
            client.chat.completions.create(model="m", messages=ASK)  # type: ignore[arg-type]


def test_the_command_serves_until_it_is_stopped(run: RunDir) -> None:
    program = Program("-m", "groundwire.train.serve", str(run.path), "--port", "0", "--served-model-name", "mine")
    until(lambda: "key:" in program.stdout_so_far(), program)
    lines = program.stdout_so_far().splitlines()
    assert lines[0] == f"model: {run.path / 'checkpoints' / 'step-00002'}"
    assert lines[2] == f"key:   in {token_place()}"
    client = openai.OpenAI(base_url=lines[1].removeprefix("serve: "), api_key=access_token())
    with pytest.raises(openai.NotFoundError, match="mine"):
        client.chat.completions.create(model="other", messages=ASK)  # type: ignore[arg-type]
    program.send_signal(signal.SIGTERM)
    assert program.wait(600).returncode == 0


def test_transformers_loads_a_checkpoint(run: RunDir) -> None:
    transformers = pytest.importorskip("transformers")
    folder = run.path / "checkpoints" / "step-00002"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    with serve(folder) as server, openai.OpenAI(base_url=server.base_url, api_key=server.api_key) as client:
        served = client.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=8)  # type: ignore[arg-type]
        assert served.choices[0].message.content == text


def test_the_interpreter_is_as_before_when_the_last_server_is_closed(served: ServedModel) -> None:
    served.close()
    before = sys.getswitchinterval()
    with serve("starter"), serve("starter") as second:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S, rel=0.01)
        second.close()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S, rel=0.01)
    assert sys.getswitchinterval() == pytest.approx(before)
