"""How long a context a model was made for, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_window(config: Mapping[str, Any]) -> int | None:
    """The longest context that the model was made for, in tokens; None when its config does not say.

    Rotations that are stretched by a factor reach that much further than `max_position_embeddings`, unless the config has
    counted it in already (llama3 and longrope always have).
    """
    inner = config.get("text_config") or config
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    window = next((int(inner[name]) for name in names if inner.get(name)), None)
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if window is None or kind not in ("linear", "dynamic", "yarn") or not rope.get("factor"):
        return window
    original = rope.get("original_max_position_embeddings") or window
    return max(window, int(original * float(rope["factor"])))
