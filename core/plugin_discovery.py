"""Where plugins come from: the built-in tuple, entry points, and the files and modules that the operator names.

Nothing here knows what a plugin provides; it finds plugin objects (modules, mostly) and says whose they are.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from .errors import PluginError
from .version import __version__

ENTRY_POINT_GROUP = "hotswap"
OWN_DISTRIBUTION = "hotswap"
MAX_CAUSE_CHARS = 300

How = Literal["built-in", "entry point", "file", "module"]


class Origin(msgspec.Struct, frozen=True):
    """Where one plugin comes from. Enough to load it again in another process.

    name: the entry point's name, the last part of the module path or the file's stem.
    target: module path, entry point value ("module" or "module:attribute") or absolute file path.
    distribution, version: of the installed distribution; a file is its own distribution, without a version.
    """

    how: How
    name: str
    target: str
    distribution: str
    version: str = ""

    @property
    def builtin(self) -> bool:
        return self.how == "built-in"

    @property
    def owner(self) -> str:
        """For messages: 'hotswap-fair 1.2.0'."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def described(self) -> str:
        """For messages: which plugin this is, whatever it provides."""
        if self.how == "file":
            return f"plugin file {self.distribution}"
        return f"plugin {self.name!r} of {self.owner}"


def same_name(left: str, right: str) -> bool:
    """Whether two distribution (or plugin) names are the same one after normalization (case, '-', '_' and '.')."""
    return normalized(left) == normalized(right)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def builtin_origins(modules: Iterable[str]) -> list[Origin]:
    return [Origin("built-in", module.rpartition(".")[2], module, OWN_DISTRIBUTION, __version__) for module in modules]


def entry_point_origins() -> list[Origin]:
    """Installed plugins in name order. Reads metadata only."""
    found = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist
        name = distribution.name if distribution else "unknown distribution"
        found.append(Origin("entry point", point.name, point.value, name, distribution.version if distribution else ""))
    return sorted(found, key=lambda origin: (origin.name, normalized(origin.distribution), origin.target))


def file_origin(target: str) -> Origin:
    """A file that the operator names. Raises PluginError when it is not there."""
    path = Path(target).expanduser()
    if not path.is_file():
        raise PluginError(f"there is no file {target}")
    return Origin("file", path.stem, str(path.resolve()), path.name)


def module_origin(target: str) -> Origin:
    """A module that the operator names, with the distribution that brought it where there is one."""
    top_level = target.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(top_level)
    if owners:
        return Origin("module", target.rpartition(".")[2], target, owners[0], importlib.metadata.version(owners[0]))
    return Origin("module", target.rpartition(".")[2], target, target)


def load(origin: Origin) -> object:
    """Imports the plugin and returns the object that holds its hook implementations. Raises whatever its code
    raises."""
    if origin.how == "file":
        return _load_file(Path(origin.target))
    if origin.how == "entry point":
        return importlib.metadata.EntryPoint(origin.name, origin.target, ENTRY_POINT_GROUP).load()
    return importlib.import_module(origin.target)


def owner_of(error: BaseException, origins: Iterable[Origin]) -> Origin | None:
    """The plugin at fault: the innermost frame of the traceback that lies in a plugin's code; None for the core's own."""
    modules = {_module_of(origin): origin for origin in origins}
    owner = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        while name and name not in modules:
            name = name.rpartition(".")[0]
        owner = modules.get(name, owner)
        trace = trace.tb_next
    return owner


def _module_of(origin: Origin) -> str:
    """The module (or package) whose code is the plugin's."""
    if origin.how == "file":
        return _module_name(Path(origin.target))
    return origin.target.partition(":")[0]


def _module_name(path: Path) -> str:
    return f"hotswap_plugin_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"


def _load_file(path: Path) -> object:
    # In sys.modules before it runs: dataclasses and pydantic look their annotations up there.
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_same_version(origin: Origin) -> None:
    """Raises PluginError when this process sees another version of the distribution than the one that was chosen."""
    if origin.how != "entry point":
        return
    try:
        here = importlib.metadata.version(origin.distribution)
    except importlib.metadata.PackageNotFoundError:
        here = "not installed"
    if here != origin.version:
        raise PluginError(
            f"{origin.described} was chosen, but in this process {origin.distribution} is {here}: "
            "the processes see different environments"
        )


def root_cause(error: BaseException) -> str:
    """The innermost cause in one line: 'ModuleNotFoundError: No module named 'foo''."""
    seen = {id(error)}
    while True:
        inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if inner is None or id(inner) in seen:
            break
        seen.add(id(inner))
        error = inner
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= MAX_CAUSE_CHARS else text[: MAX_CAUSE_CHARS - 3] + "..."
