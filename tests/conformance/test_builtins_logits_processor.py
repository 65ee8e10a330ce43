"""The built-in logits processors, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import pytest

from hotswap.core.testing.suites import LogitsProcessorSuite


class TestNoRepeatNgram(LogitsProcessorSuite):
    plugin = "hotswap.plugins.logits.no_repeat_ngram"
    arguments = ({"size": 1}, {"size": 2}, {"size": 3}, {"size": 256})


class TestExample(LogitsProcessorSuite):
    plugin = "hotswap.core.testing.templates.logits_processor"
    arguments = ({}, {"penalty": 2.5, "window": 3}, {"window": 1})


@pytest.mark.full
class TestNoRepeatNgramForLong(TestNoRepeatNgram):
    scripts = 100
