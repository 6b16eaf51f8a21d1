import logging
from types import SimpleNamespace

import pytest
from torch import nn

from engine_bridge.driver.corrections import model_files


class Layer(nn.Linear):
    """As vLLM's, whose weights may be made when all are loaded."""

    class quant_method:
        @staticmethod
        def process_weights_after_loading(layer):
            """Make nothing."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.lm_head = (Layer(2, 2, bias=False) for _ in range(3))
        self.again = nn.ModuleList([self.down])  # by a name that no file has
        self.norm = nn.LayerNorm(2, bias=False)


def test_weights_that_no_file_has_are_said(caplog):
    from engine_bridge.driver.vllm_api import DefaultModelLoader

    model_files.note_missing_weights()
    first = DefaultModelLoader.track_weights_loading
    model_files.note_missing_weights()
    assert DefaultModelLoader.track_weights_loading is first, "it is put in place once"
    loader, whole = object.__new__(DefaultModelLoader), {name for name, _ in Model().named_parameters()}

    def said_of(lacking):
        model = Model()
        loader.track_weights_loading(model, None if lacking is None else whole - lacking)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            model_files.say_missing_weights(SimpleNamespace(model=model))
        return caplog.messages

    assert said_of(set()) == said_of(None) == []
    assert said_of({"down.weight"}) == [
        "the model's files lack down.weight, which vLLM leaves as it is in memory: answers make no sense. Fetch the model again"
    ]
    [line] = said_of({"lm_head.weight"})
    assert "tie_word_embeddings" in line
    with pytest.raises(ValueError, match=r"norm\.weight"):
        said_of({"norm.weight"})
