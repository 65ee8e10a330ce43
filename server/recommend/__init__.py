"""From a trace, a model and a device to settings, with the arithmetic. No torch, no device is opened."""

from __future__ import annotations
