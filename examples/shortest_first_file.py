"""A policy in one file, nothing to install: `hotswap serve --plugin ./shortest_first_file.py`."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts import KeyedPolicy, PolicyProvider, RequestView, hookimpl


class ShortestFirst(KeyedPolicy):
    def key(self, view: RequestView) -> int:
        return view.num_prompt_tokens - view.num_cached_prompt_tokens


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(
        name="shortest_prompt_first", build=lambda context: ShortestFirst(), summary="short prompts first"
    )
