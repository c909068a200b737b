"""A Flower app to start from: `fmol new-flower-app DIR`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fmol.errors import MisuseError

__all__ = ["write_app"]

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "task.py": "{package}/task.py",
    "site.py": "{package}/site.py",
    "client_app.py": "{package}/client_app.py",
    "server_app.py": "{package}/server_app.py",
}
"""Template → where it goes."""


def write_app(folder: str | Path) -> list[Path]:
    """Writes a small, complete Flower app into the new folder, and gives its files.

    The folder's name becomes the app's, and with underscores its package's.
    """
    folder = Path(folder)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    package = name.replace("-", "_")
    if not package.isidentifier() or package in ("fmol", "flwr", "torch"):
        raise MisuseError(
            f"`{folder}` cannot be the name of an app's package, which would be `{package}`. Name a "
            "folder that begins with a letter, as my-app."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MisuseError(
            f"`{folder}` is there already, and nothing is overwritten. Name a new one."
        )
    template = resources.files("fmol.flower") / "template"
    written = []
    for source, target in FILES.items():
        path = folder / target.format(package=package)
        text = (template / f"{source}.txt").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("{{package}}", package).replace("{{name}}", name), encoding="utf-8"
        )
        written.append(path)
    init = folder / package / "__init__.py"
    init.write_text('"""A Flower app whose sites train one model with fmol."""\n', encoding="utf-8")
    return [*written, init]
