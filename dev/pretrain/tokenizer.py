"""A byte-level BPE in which a word has the same id everywhere.

A small model answers by copying, so a word needs one id in the question, the schema and the query:

* Words include the space before them. After punctuation (``t.name``, ``home_city``, ``count(name)``, ``'Ann'``) the
  normalizer inserts a glue character and a space. The glue merges with the punctuation, and the decoder removes both,
  so encoding is lossless.
* The plural's ``s`` is a separate token (``singers`` is `` singer`` + ``s``), and so is every digit.
* Every word of the lexicon is one token (``ignore_merges``). All other text is encoded with bytes and frequent merges.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from groundwire.train.policy import STARTER

__all__ = ["END_OF_TEXT", "IM_END", "IM_START", "train_tokenizer"]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_GLUE = "\x1f"
# The frames of replies, and the JSON around the name and the arguments of a tool call, have one id each. No frame may
# begin inside another, or the ids of a reply would depend on the text before it; the closing fence is therefore a word.
_FRAMES = ["```sql\n", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_FRAMES += ['\n{"name":', '", "arguments":', '"}}\n</tool_call>']
_OUTSIDE = re.compile("|".join(re.escape(token) for token in (END_OF_TEXT, IM_START, IM_END, *_FRAMES)))
_WORDS = r"\n```(?![a-z\x1f])| ?[A-Za-z]+| ?[0-9]|\n| ?[^\sA-Za-z0-9]+|\s"
_PLURAL = r"(?:(?<=[a-z]x)|(?<=[a-z](?:ch|sh|ss)))es(?![A-Za-z])|(?<=[a-z]{2}[^sA-Z\W\d_])s(?![A-Za-z])"


def _skeleton(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    inside = Regex(r"(?<=[^A-Za-z\s])(?=[A-Za-z])")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(inside, f"{_GLUE} ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PLURAL), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # One expression, so that a stream that ends after the glue shows no text that a later token removes.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(f"{_GLUE} ?"), "")])
    return tokenizer


def train_tokenizer(
    texts: Iterable[str],
    *,
    words: Iterable[str] = (),
    min_count: int = 20,
    merges: int = 200,
) -> PreTrainedTokenizerFast:
    """A tokenizer in which ``words``, and those that occur ``min_count`` times in ``texts``, have one id each.

    ``merges`` is the number of learned pieces for other text. The same input gives the same ids.
    """
    draft = _skeleton(models.BPE())
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_pieces(draft, text))
    wanted = {piece for piece, n in counts.items() if n >= min_count}
    for word in words:
        wanted.update(_pieces(draft, f" {word}"))

    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # The pieces are byte-level already, so this draft has no pre-tokenizer.
    draft = Tokenizer(models.BPE())
    draft.train_from_iterator((piece for piece in sorted(counts) for _ in range(min(counts[piece], 50))), trainer)
    learned = [piece for piece, _ in sorted(draft.get_vocab().items(), key=lambda item: item[1])]
    vocabulary = {piece: i for i, piece in enumerate(learned + sorted(wanted.difference(learned)))}
    learned_merges = [(left, right) for left, right in json.loads(draft.to_str())["model"]["merges"]]

    tokenizer = _skeleton(models.BPE(vocab=vocabulary, merges=learned_merges, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END_OF_TEXT, IM_START, IM_END)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _FRAMES])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    fast.chat_template = (STARTER / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of ``text`` without special tokens and frames."""
    segments = (tokenizer.normalizer.normalize_str(segment) for segment in _OUTSIDE.split(text))
    return [piece for segment in segments for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(segment)]
