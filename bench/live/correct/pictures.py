"""What tiny models that read pictures need beside their weights: the files of their processors, the tokens that stand for a picture, and pictures."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec import Struct

# Next after the letters of the vocabulary, and never an answer: `families._spread` gives them no weights in the head.
FIRST_SPECIAL = 259
_NAMES = (
    "<|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <start_of_image> <end_of_image> <image_soft_token> <image>"
).split()
TOKENS = {name: FIRST_SPECIAL + number for number, name in enumerate(_NAMES)}
# Gemma's processor looks these up in the vocabulary.
_LINES = {"\n" * number: FIRST_SPECIAL + len(_NAMES) + number - 1 for number in (1, 2, 3, 4)}


class Sight(Struct, frozen=True, kw_only=True):
    """How a family reads pictures.

    Attributes:
        mark: what its chat template writes for a picture.
        token: the token that the prompt has for each of a picture's embeddings.
        names: entries of tokenizer_config.json by which its processor finds its tokens.
        processor: preprocessor_config.json.
        video_processor: the class that reads videos, which its processor asks for; "" for none.
    """

    mark: str
    token: str
    names: Mapping[str, str]
    processor: Mapping[str, Any]
    video_processor: str = ""

    @property
    def token_id(self) -> int:
        """The id of `token`."""
        return TOKENS[self.token]

    def write(self, folder: Path) -> None:
        """Add to a model's folder, which has a tokenizer, what reading pictures needs."""
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        for content, number in (TOKENS | _LINES).items():
            kind = {"special": content in TOKENS, "normalized": False}
            sides = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            tokenizer["added_tokens"].append({"id": number, "content": content} | kind | sides)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        template = (
            "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
            "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
            + self.mark
            + "{% endif %}"
            "{% endfor %}{% endif %}\n{% endfor %}assistant: "
        )
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | self.names))
        (folder / "chat_template.jinja").write_text(template)
        (folder / "preprocessor_config.json").write_text(json.dumps(_NORMALISED | self.processor))
        of_whole = {name: self.processor[name] for name in _OF_WHOLE if name in self.processor}
        (folder / "processor_config.json").write_text(json.dumps(of_whole))
        if self.video_processor:
            video = {"video_processor_type": self.video_processor}
            video |= {
                name: self.processor[name] for name in ("patch_size", "merge_size", "temporal_patch_size")
            }
            (folder / "video_preprocessor_config.json").write_text(json.dumps(video))

    def collapsed(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt with one token for each picture, which is how a prompt is given that is yet to be processed."""
        runs = ((token, list(run)) for token, run in groupby(ids))
        return [each for token, run in runs for each in ([token] if token == self.token_id else run)]


# What the file of the whole processor, of texts and pictures, has.
_OF_WHOLE = (
    "processor_class image_seq_length patch_size vision_feature_select_strategy num_additional_image_tokens spatial_merge_size "
    "image_token image_break_token image_end_token"
).split()
# vLLM normalises on the device, by what the file says; where it says nothing it normalises nothing.
_NORMALISED = {
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.2, 0.3, 0.25],
}


def _qwen(patch_size: int, processor_class: str) -> Sight:
    edge = 2 * patch_size
    return Sight(
        mark="<|vision_start|><|image_pad|><|vision_end|>",
        token="<|image_pad|>",
        names={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        },
        processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": processor_class,
            "patch_size": patch_size,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 4 * edge**2, "longest_edge": 64 * edge**2},
        },
        video_processor="Qwen2VLVideoProcessor" if patch_size == 14 else "Qwen3VLVideoProcessor",
    )


SIGHTS = {
    "qwen2.5-vl": _qwen(14, "Qwen2_5_VLProcessor"),
    "qwen3-vl": _qwen(16, "Qwen3VLProcessor"),
    "llava": Sight(
        mark="<image>",
        token="<image>",
        names={"image_token": "<image>"},
        processor={
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "pixtral": Sight(
        mark="<image>",
        token="<image>",
        names={"image_token": "<image>"},
        processor={
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": 112},
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "<image>",
            "image_break_token": "<|vision_start|>",
            "image_end_token": "<|vision_end|>",
        },
    ),
    "gemma3": Sight(
        mark="<start_of_image>",
        token="<image_soft_token>",
        names={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": False,
            "image_seq_length": 4,
        },
    ),
}
"""By the name that a family's `sight` has."""


def picture(seed: int, width: int = 112, height: int = 112) -> bytes:
    """Return a PNG of coloured noise. Equal seeds and sizes give equal pictures."""
    from PIL import Image

    image = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def as_image(png: bytes) -> Any:
    """Return a PNG as the image that processors take."""
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


def data_uri(png: bytes) -> str:
    """Return a PNG as the URL in which clients send it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def as_part(png: bytes) -> dict[str, Any]:
    """Return a PNG as a part of a chat completion's message."""
    return {"type": "image_url", "image_url": {"url": data_uri(png)}}


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the PNGs of a conversation's messages, in their order."""
    contents = (message["content"] for message in messages if not isinstance(message["content"], str))
    urls = (part["image_url"]["url"] for content in contents for part in content if "image_url" in part)
    return [base64.b64decode(url.partition(",")[2]) for url in urls]
