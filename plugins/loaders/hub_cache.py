"""What is in the Hugging Face hub's cache, by its layout on disk:

    models--ORG--NAME/refs/BRANCH_OR_TAG            holds a commit
    models--ORG--NAME/snapshots/COMMIT/FILE         links to ../../blobs/HASH
    models--ORG--NAME/blobs/HASH[.incomplete]

Read without the hub's own library, which stops at the first damaged entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotswap.core.contracts.source import CachedModel

_PREFIX = "models--"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_MAX_INDEX_BYTES = 64 << 20


def cached_models(hub_cache: Path) -> list[CachedModel]:
    """Every snapshot of a model repository, ordered by name; GGUF repositories file by file."""
    if not hub_cache.is_dir():
        return []
    found: list[CachedModel] = []
    for folder in sorted(hub_cache.glob(f"{_PREFIX}*")):
        name = folder.name.removeprefix(_PREFIX).replace("--", "/", 1)
        if folder.is_dir() and "/" in name:
            found.extend(_repository(folder, name))
    return found


def _repository(folder: Path, name: str) -> Iterator[CachedModel]:
    refs = _refs(folder / "refs")
    snapshots = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
    unfinished = any((folder / "blobs").glob("*.incomplete"))
    if not snapshots:
        damage = "a download was interrupted" if unfinished else "there is no snapshot of it"
        yield CachedModel(
            name=name, path=folder, num_bytes=_size(folder / "blobs"), format="", used_at=0.0, damage=damage
        )
    for snapshot in snapshots:
        revision = refs.get(snapshot.name, snapshot.name)
        # The weights of a sharded model are there or not; only when one is missing does an unfinished blob say why.
        yield from _snapshot(snapshot, name, None if revision == "main" else revision, unfinished)


def _refs(folder: Path) -> dict[str, str]:
    """Commit -> its branch or tag, `main` before others."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix() == "main"):
        if path.is_file():
            found[path.read_text(encoding="utf-8", errors="replace").strip()] = path.relative_to(folder).as_posix()
    return found


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a snapshot by their name in the repository; broken links apart."""

    whole: dict[str, Path]
    broken: list[str]

    def size(self, names: list[str]) -> int:
        return sum(self.whole[name].stat().st_size for name in names)

    def used_at(self, names: list[str]) -> float:
        facts = [self.whole[name].stat() for name in names]
        return max((max(fact.st_atime, fact.st_mtime) for fact in facts), default=0.0)


def _files(snapshot: Path) -> _Files:
    whole, broken = {}, []
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            whole[path.relative_to(snapshot).as_posix()] = path
        elif path.is_symlink():
            broken.append(path.relative_to(snapshot).as_posix())
    return _Files(whole, broken)


def _snapshot(snapshot: Path, name: str, revision: str | None, unfinished: bool) -> Iterator[CachedModel]:
    files = _files(snapshot)
    gguf = [file for file in files.whole if file.endswith(".gguf")]
    safetensors = [file for file in files.whole if file.endswith(".safetensors")]
    if gguf and not safetensors:
        for first, (parts, total) in _gguf_models(gguf).items():
            yield CachedModel(
                name=f"{name}:{first}",
                path=snapshot / first,
                num_bytes=files.size(parts),
                format="gguf",
                used_at=files.used_at(parts),
                revision=revision,
                damage="" if len(parts) == total else f"{total - len(parts)} of {total} parts are missing",
            )
        return
    everything = list(files.whole)
    yield CachedModel(
        name=name,
        path=snapshot,
        num_bytes=files.size(everything),
        format="safetensors" if safetensors else "",
        used_at=files.used_at(everything),
        revision=revision,
        damage=_damage(snapshot, files, safetensors, unfinished),
    )


def _gguf_models(names: list[str]) -> dict[str, tuple[list[str], int]]:
    """First file -> (its parts, how many there should be); a file that is no part of several is its own."""
    found: dict[str, tuple[list[str], int]] = {}
    for name in sorted(names):
        part = _PART.fullmatch(name)
        if part is None:
            found[name] = ([name], 1)
        else:
            first = f"{part['stem']}-{'1'.zfill(len(part['number']))}-of-{part['total']}.gguf"
            found.setdefault(first, ([], int(part["total"])))[0].append(name)
    return found


def _damage(snapshot: Path, files: _Files, safetensors: list[str], unfinished: bool) -> str:
    missing = sorted({*files.broken, *(shard for shard in _shards(snapshot) if shard not in files.whole)})
    why = ": a download was interrupted" if unfinished else ""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"{missing[0]}{more} missing{why}"
    if not safetensors:
        return f"no weights{why or ' in a form that is read: neither safetensors nor GGUF'}"
    return "" if "config.json" in files.whole else "no config.json"


def _shards(snapshot: Path) -> list[str]:
    """The files that the index of a sharded model names; none when there is no index, or none that can be read."""
    index = snapshot / "model.safetensors.index.json"
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            return []
        content = json.loads(index.read_text(encoding="utf-8"))
        return sorted({str(shard) for shard in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
