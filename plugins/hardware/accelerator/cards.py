"""Cards as a driver lists them, and which of them this process may see. Plain data; no driver, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.core.contracts import DeviceInfo, PluginError


@dataclass(frozen=True, slots=True)
class Card:
    """uuid: as the variables that hide cards name it ("GPU-..."). refusals: every reason why it cannot be used."""

    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int] = (0, 0)
    features: frozenset[str] = frozenset()
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """cards: the visible ones, in torch's order. problems: why there are none, or not all.
    driver_cuda: the newest CUDA that the driver can run, (0, 0) where that is no question."""

    cards: tuple[Card, ...] = ()
    problems: tuple[str, ...] = ()
    driver_cuda: tuple[int, int] = (0, 0)


def hide(host: Host, variable: str, value: str | None) -> Host:
    """The cards that a variable such as CUDA_VISIBLE_DEVICES leaves, in its order. None: it is not set, and hides nothing.

    As the drivers read it: places or beginnings of uuids, separated by commas; whatever comes after the first entry that names
    no card is ignored; a card named twice hides all of them.
    """
    if value is None:
        return host
    shown: list[Card] = []
    problems = list(host.problems)
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            problems.append(f"{variable} names {entry}: slices of a card (MIG) are not supported, name a whole card")
            break
        card = _named(entry, host.cards)
        if card is None:
            break
        shown.append(card)
    if len(set(shown)) < len(shown):
        problems.append(f"{variable}={value!r} names a card twice, which hides every card")
        shown = []
    elif not shown and host.cards and len(problems) == len(host.problems):
        problems.append(f"{variable}={value!r} names none of the {len(host.cards)} cards that there are")
    return dataclasses.replace(host, cards=tuple(shown), problems=tuple(problems))


def _named(entry: str, cards: Sequence[Card]) -> Card | None:
    if entry.isdecimal():
        return cards[int(entry)] if int(entry) < len(cards) else None
    found = [card for card in cards if entry and card.uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None


def refusals(host: Host) -> list[str]:
    """Why no card of this host can be used; empty when one can."""
    if any(not card.refusals for card in host.cards):
        return []
    return [*host.problems, *(f"{card.name}: {reason}" for card in host.cards for reason in card.refusals)]


def facts(host: Host, kind: str, index: int) -> DeviceInfo:
    """The card at a place, as the engine knows devices. Raises PluginError for a place that is empty or cannot be used."""
    if index >= len(host.cards):
        raise PluginError(
            f"--plugin platform={kind},device={index}: {len(host.cards)} cards are visible, counted from 0"
        )
    card = host.cards[index]
    if card.refusals:
        able = [str(place) for place, other in enumerate(host.cards) if not other.refusals]
        instead = f"; can be used: device={' or device='.join(able)}" if able else ""
        raise PluginError(f"platform {kind}: device {index}, {card.name}: {'; '.join(card.refusals)}{instead}")
    return DeviceInfo(
        kind=kind,
        name=card.name,
        capability=card.capability,
        memory_bytes=card.memory_bytes,
        count=len(host.cards),
        features=card.features,
    )
