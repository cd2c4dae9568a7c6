"""Grammars, small tokenizers of each kind, and calls that were sampled with them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groundwire.adapters.tracing.calls import LLMCall
from groundwire.train.policy.grammar import calls_and_json

__all__ = ["ANSWER", "GRAMMARS", "SMALL", "TOOLS", "byte_level_tokenizer", "call_of", "sentencepiece_tokenizer"]

SMALL = {"width": 32, "layers": 2, "heads": 2, "intermediate": 64}
QUERY = {"type": "object", "properties": {"sql": {"type": "string", "maxLength": 12}}, "required": ["sql"]}
QUERY["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "query", "parameters": QUERY}},
    {"type": "function", "function": {"name": "list tables"}},
]
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["New York", "b, c", "t.name", "é"]}, "ages": {"type": "array", "maxItems": 2,
                   "items": {"type": "integer", "minimum": 0, "maximum": 99}}, "sure": {"type": "boolean"}},
    "required": ["name", "ages", "sure"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMARS = {
    "schema": calls_and_json(ANSWER),
    "calls": calls_and_json(None, TOOLS[:1]),
    "either": calls_and_json(ANSWER, TOOLS[:1], several=False),
    "llama": calls_and_json(None, TOOLS[:1], tool_format="llama3_json"),
}


def byte_level_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(['{"name": "query", "ages": [1, 22], "sure": true}', "<tool_call> select"], trainer)
    return fast(tokenizer)


def sentencepiece_tokenizer():
    space = "\u2581"
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(0x21, 0x7F)), space, f"{space}{{", '":']
    vocabulary, merges = {token: index for index, token in enumerate(tokens)}, [(space, "{"), ('"', ":")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast(tokenizer)


def fast(tokenizer):
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def call_of(reply, grammar="", sequence=0):
    return LLMCall(
        rollout_id="r", attempt_id="a", sequence=sequence, prompt_ids=list(reply.prompt_ids),
        response_ids=reply.token_ids, logprobs=reply.logprobs, grammar=grammar,
    )  # fmt: skip
