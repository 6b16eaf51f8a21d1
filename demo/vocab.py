"""The demo model's tokenizer: whole frequent words, single bytes for everything else.

It is a byte-level BPE model with an empty merge list and ``ignore_merges``: a
piece of text that is in the vocabulary as a whole becomes one token, any other
piece falls back to its bytes.  So every Unicode text round-trips, and a made-up
word is always spelled letter by letter, in the same way wherever it stands.
That regularity is what lets a model of two million parameters copy words it
has never seen; with ordinary merges a new word is cut differently after a
space, at the start of a line or in capitals.
"""

from __future__ import annotations

import collections
import json
import pathlib
import random

import phrases
import text
import tool_talks
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIALS = [PAD, END, SYSTEM, USER, ASSISTANT]
# Parts of tool calls that are one token wherever they stand, so that a call is copied in few steps.
FORM = [
    tool_talks.CALL,
    tool_talks.CALL_END,
    tool_talks.RESULT,
    tool_talks.RESULT_END,
    '{"name": "',
    '", "arguments": {',
    "}}",
]
VOCAB_SIZE = 1280
SHOUTED_WORDS = 140  # how many of the entries are reserved for words in capitals
# Contractions, words, single digits, runs of marks, white space.  A digit never takes the
# space before it along, so that a number is spelled alike everywhere.
PATTERN = r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- macro content_of(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}{%- elif part.text is defined -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>Tools:
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{%- set parameters = function.parameters or {} -%}
{%- set properties = parameters.properties or {} -%}
{{ '\\n{"name": "' + function.name + '", "arguments": {' }}
{%- for key in (parameters.required if parameters.required is defined else properties) -%}
{%- set type = (properties[key] or {}).type -%}
{{ '"' + key + '": ' + ('number' if type in ['number', 'integer'] else '"text"') }}
{{- ', ' if not loop.last }}
{%- endfor -%}
{{ '}}' }}{% if function.description %}{{ ' ' + (function.description | trim).split('\\n')[0] }}{% endif %}
{%- endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}<|system|>
{%- elif message.role == 'assistant' -%}<|assistant|>
{%- else -%}<|user|>
{%- endif -%}
{%- if message.role == 'tool' -%}<tool_response>{{ content_of(message.content) }}</tool_response>
{%- else -%}{{ content_of(message.content) }}
{%- endif -%}
{%- if message.tool_calls is defined and message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{%- set arguments = function.arguments or {} -%}
{{ '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor -%}
{%- endif -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def splitter():
    """The pre-tokenizer: cut at PATTERN, then write every byte as a printable character."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def count_pieces(texts: list[str]) -> collections.Counter:
    """How often each piece (in byte-level spelling) occurs."""
    split, counts = splitter(), collections.Counter()
    for line in texts:
        counts.update(piece for piece, _ in split.pre_tokenize_str(line))
    return counts


def frequent_words(seed: int) -> list[str]:
    """The words of the training text that deserve a token, most frequent first.

    Names and cities are left out although they are frequent: the model has to
    treat them like any other word that somebody may choose.
    """
    rng = random.Random(seed)
    plain = [m for _ in range(8000) for _, m in text.conversation(rng)]
    loud = [m for _ in range(800) for _, m in text.conversation(rng, style="shout")]
    taken = {w.lower() for kind in phrases.REAL.values() for w in kind}
    taken -= {"bath", "max"}

    def usable(piece: str) -> bool:
        """Longer than a byte and not somebody's name."""
        return len(piece) > 1 and piece.strip("\u0120").lower() not in taken

    ordinary = [p for p, n in count_pieces(plain).most_common() if usable(p) and n >= 4]
    shouted = [
        p
        for p, n in count_pieces(loud).most_common()
        if usable(p) and n >= 4 and p.isupper() and len(p.strip("\u0120")) > 1
    ]
    room = VOCAB_SIZE - 256 - len(SPECIALS) - len(FORM)
    chosen = dict.fromkeys(shouted[:SHOUTED_WORDS])
    for piece in ordinary:
        if len(chosen) == room:
            break
        chosen[piece] = None
    return list(chosen)


def build(seed: int) -> Tokenizer:
    """The tokenizer trained on a sample of the training text."""
    return of_pieces(SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + frequent_words(seed) + FORM)


def with_form(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, in which the rarest words made room for FORM if it had none."""
    vocab = tokenizer.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    return tokenizer if FORM[0] in vocab else of_pieces(pieces[: -len(FORM)] + FORM)


def of_pieces(pieces: list[str]) -> Tokenizer:
    """The tokenizer with these tokens, in the order of their ids."""
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in FORM])
    return tokenizer


def save(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder:
    """Turns conversations into token ids and a mask of the tokens the model has to write."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.id = {s: tokenizer.token_to_id(s) for s in SPECIALS}
        self.role = {"system": self.id[SYSTEM], "user": self.id[USER], "assistant": self.id[ASSISTANT]}

    def encode(self, messages: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
        """Ids of the whole conversation, and 1 for each token of an answer or its end."""
        ids, mask = [], []
        for (role, _), piece in zip(
            messages, self.tokenizer.encode_batch([content for _, content in messages])
        ):
            answer = int(role == "assistant")
            ids += [self.role[role], *piece.ids, self.id[END]]
            mask += [0] + [answer] * (len(piece.ids) + 1)
        return ids, mask

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        """Ids of the conversation, ready for the next answer."""
        return self.encode(messages)[0] + [self.id[ASSISTANT]]
