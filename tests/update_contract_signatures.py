"""Replaces tests/data/contract_signatures.json by what the contracts are now, unless plugins would break unannounced.

PYTHONPATH=src python tests/update_contract_signatures.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hotswap.core.contracts.kinds import KINDS
from hotswap.core.testing.signatures import Snapshot, blocked, current_snapshot, verdict

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "data" / "contract_signatures.json"
COMMAND = "run PYTHONPATH=src python tests/update_contract_signatures.py"


def documented_kinds() -> dict[str, str]:
    """The section of each kind in docs/plugins/contracts.md."""
    page = (ROOT / "docs" / "plugins" / "contracts.md").read_text(encoding="utf-8")
    sections = {}
    for kind in KINDS:
        _, found, rest = page.partition(f"\n## {kind}\n")
        sections[kind] = rest.split("\n## ")[0] if found else ""
    return sections


def committed_snapshot() -> Snapshot:
    loaded: Snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return loaded


def as_text(snapshot: Snapshot) -> str:
    """One line a member, so that a change reads well in review."""
    lines = ["{", f' "versions": {json.dumps(snapshot["versions"])},', ' "modules": {']
    modules = []
    for module, names in snapshot["modules"].items():
        inside = []
        for name, described in names.items():
            parts = [f"    {json.dumps(key)}: {_value(value)}" for key, value in described.items()]
            inside.append(f"   {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n   }")
        body = "{\n" + ",\n".join(inside) + "\n  }" if inside else "{}"
        modules.append(f"  {json.dumps(module)}: {body}")
    return "\n".join([*lines, ",\n".join(modules), " }", "}"]) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"     {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n    }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"     {json.dumps(item)}" for item in value) + "\n    ]"
    return json.dumps(value)


def main() -> int:
    after = current_snapshot()
    if SNAPSHOT.exists():
        sentences = blocked(verdict(committed_snapshot(), after, documented_kinds(), COMMAND), COMMAND)
        if sentences:
            print("\n".join(sentences), file=sys.stderr)
            return 1
    SNAPSHOT.write_text(as_text(after), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
