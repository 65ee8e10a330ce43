"""`hotswap plugins new KIND NAME`: a package with a complete small plugin, its test and its README, to change from."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hotswap.core.contracts.kinds import KINDS, Kind
from hotswap.core.errors import UsageError
from hotswap.core.plugin_selection import AUTO
from hotswap.core.testing.finding import offered_by
from hotswap.core.version import __version__

NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]*")
MAX_NAME_CHARS: Final = 40
TEMPLATES: Final = "hotswap.core.testing.templates"

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "0.1.0"
description = "{kind} {name} for hotswap"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["hotswap>={version}"]

[project.optional-dependencies]
testing = ["hotswap[testing]"]

# The name on the left is this plugin's among those installed; on the right the module with the hooks.
[project.entry-points.hotswap]
{name} = "{module}"

[tool.setuptools]
package-dir = {{ "" = "src" }}
py-modules = ["{module}"]
"""

_TEST = """\
\"\"\"The {kind} keeps its contract: the checks are hotswap's own, see docs/plugins/testing.md there.\"\"\"

from __future__ import annotations

from hotswap.core.testing.suites import {suite}
"""

_TEST_CLASS = """

class Test{title}({suite}):
    plugin = "{module}"
"""

_README = """\
# {distribution}

{kind} `{name}` for hotswap: {summary}

```
pip install -e '.[testing]'
hotswap plugins check {kind}={name}
python -m pytest
```

To use it:

```
hotswap serve --plugin {kind}={name}
```

`src/{module}.py` is the whole plugin. What a {kind} may and must do: docs/plugins/{kind}.md of hotswap.
"""


def write_package(kind: str, name: str, parent: Path, *, taken: Mapping[str, str]) -> Path:
    """Writes `parent/hotswap-NAME` and returns it. taken: names of the kind that are there, with whose they are. Raises
    UsageError for a name that cannot be, or one that is taken, and when the folder exists.
    """
    check_name(KINDS[kind], name, taken)
    distribution, module, title = f"hotswap-{name.replace('_', '-')}", f"hotswap_{name}", camel(name)
    folder = parent / distribution
    if folder.exists():
        raise UsageError(f"{folder} exists already; remove it, or write elsewhere with --dir DIR")
    source = renamed_template(kind, name)
    fields = {
        "kind": kind,
        "name": name,
        "distribution": distribution,
        "module": module,
        "title": title,
        "suite": f"{camel(kind)}Suite",
        "version": __version__,
        "summary": source.partition("\n")[0].partition(": ")[2].rstrip('".') + ".",
    }
    files = {
        "pyproject.toml": _PYPROJECT.format(**fields),
        "README.md": _README.format(**fields),
        f"src/{module}.py": source,
        "tests/test_conformance.py": _TEST.format(**fields) + _test_classes(kind, fields),
    }
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def _test_classes(kind: str, fields: Mapping[str, str]) -> str:
    """One class; for a kind with one active per op, one for each op that the template offers."""
    ops = [found.op for found in offered_by(f"{TEMPLATES}.{kind}") if found.op is not None]
    if not ops:
        return _TEST_CLASS.format(**fields)
    classes = [
        _TEST_CLASS.format(**{**fields, "title": fields["title"] + camel(op)}) + f'    op = "{op}"\n' for op in ops
    ]
    return "".join(classes)


def check_name(kind: Kind, name: str, taken: Mapping[str, str]) -> None:
    """Raises UsageError for a name that no plugin of the kind can have."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a plugin's name: lower case letters, digits and '_', a letter first")
    if len(name) > MAX_NAME_CHARS:
        raise UsageError(f"a name of {len(name)} characters: at most {MAX_NAME_CHARS}")
    if name in (AUTO, kind.fallback):
        raise UsageError(f"{name!r} has a meaning of its own for {kind.name}; take another name")
    if name in taken:
        raise UsageError(f"{kind.name} {name!r} is there already ({taken[name]}); take another name")


def renamed_template(kind: str, name: str) -> str:
    """The kind's template with its names in place of `my_KIND` and `MyKind`."""
    template = importlib.resources.files(TEMPLATES).joinpath(f"{kind}.py")
    text = template.read_text(encoding="utf-8")
    return text.replace(f"my_{kind}", name).replace(f"My{camel(kind)}", camel(name))


def camel(name: str) -> str:
    """'fair_share' -> 'FairShare'."""
    return "".join(part.capitalize() for part in name.split("_"))
