from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine_bridge.driver.corrections.detokenizing import FastDetokenizer, SlowDetokenizer
from engine_bridge.driver.vllm_api import SamplingParams

SIGNS = bytes_to_unicode()  # of GPT-2's alphabet
LETTERS = [chr(code) for code in range(33, 127)]


def byte_fallback() -> Any:
    """As Llama 2's and Gemma's: pieces of text, a sign for spaces, and a token for each byte of what has no piece."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces = ["▁", *LETTERS, "▁word", "�"]
    vocab |= {piece: 256 + number for number, piece in enumerate(pieces)}
    model = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<0x00>"))
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    model.decoder = decoders.Sequence(list(parts))
    model.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=model)


def byte_level() -> Any:
    """As GPT-2's: every token stands for bytes."""
    model = tokenizers.Tokenizer(models.BPE({sign: at for at, sign in enumerate(SIGNS.values())}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=model)


FALLBACK, LEVEL, SLOW = byte_fallback(), byte_level(), ByT5Tokenizer()


def ids_of(tokenizer: Any, data: str | bytes) -> list[int]:
    """Ids of text, a token for each byte."""
    data = data.encode() if isinstance(data, str) else data
    if tokenizer is SLOW:
        return [byte + 3 for byte in data]
    if tokenizer is FALLBACK:
        return [256 + 1 + byte - 33 if 33 <= byte < 127 else 256 if byte == 32 else byte for byte in data]
    return [tokenizer.convert_tokens_to_ids(SIGNS[byte]) for byte in data]


def answered(tokenizer: Any, prompt: list[int], answer: list[int], **settings: Any) -> tuple[str, Any]:
    """The answer's text, and the stop string that ended it."""
    asked = {"request_id": "r", "prompt_token_ids": prompt, "prompt_embeds": None}
    request: Any = SimpleNamespace(**asked, sampling_params=SamplingParams(**settings))
    detokenizer = (SlowDetokenizer if tokenizer is SLOW else FastDetokenizer)(tokenizer, request)
    for token_id in answer:
        if stopped := detokenizer.update([token_id], False):
            return detokenizer.get_next_output_text(True, False), stopped
    return detokenizer.get_next_output_text(True, False), None


every_kind = pytest.mark.parametrize("tokenizer", [FALLBACK, LEVEL, SLOW], ids=["fallback", "level", "slow"])


@every_kind
def test_a_character_that_the_answer_completes_is_its_beginning(tokenizer: Any) -> None:
    for character in "é€😀":
        for num_known in range(1, len(character.encode())):
            known, missing = character.encode()[:num_known], character.encode()[num_known:]
            for before in (b"my secret ", b""):
                answer = ids_of(tokenizer, missing + b" ok")
                assert answered(tokenizer, ids_of(tokenizer, before + known), answer)[0] == f"{character} ok"
    for prompt in ("a", "my secret é", "my secret "):  # that end with a character
        assert answered(tokenizer, ids_of(tokenizer, prompt), ids_of(tokenizer, "�x é"))[0] == "�x é"


@every_kind
def test_what_the_answer_does_not_complete_stays_the_prompts(tokenizer: Any) -> None:
    ok = ids_of(tokenizer, "ok")
    for end in ("é".encode()[:1], "😀".encode()[:1]):
        assert answered(tokenizer, ids_of(tokenizer, b"my secret " + end), ok)[0] == "ok"
    no_text = answered(tokenizer, ids_of(tokenizer, b"my secret " + b"\x80" * 40), ok)[0]
    assert "secret" not in no_text and no_text.endswith("ok")
    if tokenizer is not SLOW:  # people paste what others' programs have made of half characters
        assert answered(tokenizer, ids_of(tokenizer, "my secret �"), ok) == ("ok", None)
        special = [tokenizer.convert_tokens_to_ids("</s>")] * 40
        prompt = [*ids_of(tokenizer, b"my secret " + "é".encode()[:1]), *special]
        assert "secret" not in answered(tokenizer, prompt, ok)[0]


@pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK])
def test_stop_strings_are_not_looked_for_in_the_prompt(tokenizer: Any) -> None:
    prompt = ids_of(tokenizer, b"my secret is ok " + "é".encode()[:1])
    answer = ids_of(tokenizer, b"and then ok!")
    assert answered(tokenizer, prompt, answer, stop=["secret", "ok"]) == ("and then ", "ok")
