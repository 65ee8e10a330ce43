"""Loaders and sources as plugins: which formats and places of models are known."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.loader import Loader, LoaderContext
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.source import Source, SourceContext


def _safetensors(context: LoaderContext) -> Loader:
    from .safetensors import SafetensorsLoader

    return SafetensorsLoader()


def _gguf(context: LoaderContext) -> Loader:
    from .gguf import GGUFLoader

    return GGUFLoader()


def _dummy(context: LoaderContext) -> Loader:
    from .dummy import DummyLoader

    return DummyLoader([_safetensors(context), _gguf(context)])


@hookimpl
def hotswap_loader() -> Iterator[Provider[Loader]]:
    yield Provider(
        name="safetensors", build=_safetensors, priority=10, summary="Folders of .safetensors files, sharded or not."
    )
    yield Provider(
        name="gguf", build=_gguf, priority=5, summary="GGUF files, dequantized on load, with their tokenizer."
    )
    yield Provider(
        name="dummy", build=_dummy, automatic=False, summary="A checkpoint's config with seeded random weights."
    )


def _local(context: SourceContext) -> Source:
    from .source_local import LocalSource

    return LocalSource()


def _hub(context: SourceContext) -> Source:
    from .source_hub import HubSource

    return HubSource(with_code=context.config.model.trust_remote_code)


def _pypi(context: SourceContext) -> Source:
    from .source_pypi import PypiSource

    return PypiSource()


@hookimpl
def hotswap_source() -> Iterator[Provider[Source]]:
    yield Provider(name="local", build=_local, priority=20, summary="A folder or file on this machine.")
    yield Provider(name="pypi", build=_pypi, priority=10, summary="pypi:PACKAGE, a model inside a Python package.")
    yield Provider(name="hub", build=_hub, summary="ORG/NAME on the Hugging Face hub.")
