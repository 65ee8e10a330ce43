"""The built-in model families, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import pytest

from hotswap.core.testing.suites import ModelSuite


class TestDenseDecoder(ModelSuite):
    plugin = "hotswap.plugins.models.dense_decoder"
    tiny_models = ("llama", "llama-tied")


class TestTransformers(ModelSuite):
    plugin = "hotswap.plugins.models.transformers_fallback"
    tiny_models = ("starcoder2",)
    max_tensors = 3  # every load of this one checks the model against transformers


class TestExample(ModelSuite):
    plugin = "hotswap.core.testing.templates.model"


@pytest.mark.full
class TestDenseDecoderOfOtherFamilies(ModelSuite):
    plugin = "hotswap.plugins.models.dense_decoder"
    tiny_models = ("gemma2", "olmo2", "phi3", "qwen3", "smollm3", "granite")


@pytest.mark.full
class TestTransformersOfOtherFamilies(ModelSuite):
    plugin = "hotswap.plugins.models.transformers_fallback"
    tiny_models = ("gpt-neox", "opt", "stablelm")
    names_differ = True  # transformers renames gpt-neox's output head while it loads
