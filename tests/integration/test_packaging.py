"""What is shipped: a pure-Python wheel that holds the three wings, with few direct dependencies."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MAX_DEPENDENCIES = 20


def test_direct_dependencies_are_few() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    dependencies = project["dependencies"]
    assert len(dependencies) <= MAX_DEPENDENCIES, dependencies
    heavy = {"triton", "ray", "flash-attn"}
    assert heavy <= set(project["optional-dependencies"])
    assert not [name for name in dependencies if name.split(">")[0].strip() in heavy]


def test_the_wheel_is_pure_python_and_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        original, copy = REPOSITORY / name, source / name
        if not original.exists() and not original.is_symlink():
            continue  # deleted in the working tree
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_symlink():
            copy.symlink_to(original.readlink())
        else:
            copy.write_bytes(original.read_bytes())
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hotswap"}
    modules = [
        name
        for name in listed.splitlines()
        if name.startswith(("core/", "plugins/", "server/")) and name.endswith(".py")
    ]
    missing = [name for name in modules if (REPOSITORY / name).exists() and f"hotswap/{name}" not in names]
    assert missing == []
    assert "hotswap/py.typed" in names
