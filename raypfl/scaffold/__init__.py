"""`raypfl new-method NAME`: a package with one method, its row of the contract table and its tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from raypfl.errors import ConfigError, StorageError
from raypfl.methods import METHODS
from raypfl.plugins import METHOD_GROUP, install
from raypfl.records.files import storage_errors, write_text

TEMPLATES = Path(__file__).parent


def new_method(name: str, folder: Path) -> list[Path]:
    """Write the package `folder/name`: FedAvg, until something is changed.

    Args:
        name: what a configuration calls the method, such as `fedprox`.
        folder: must not have a folder of that name.

    Returns:
        The files.

    Raises:
        ConfigError: the name is taken, or cannot be a module's.
        StorageError: the folder is there already, or cannot be written.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a method and its module. Use small letters, digits and _, such as fedprox."
        )
    if name in METHODS or name in install()[METHOD_GROUP].broken:
        raise ConfigError(
            f"a method {name!r} exists already. `raypfl list methods` has all; take another name."
        )
    package = folder / name
    with storage_errors(package, "create"):
        try:
            package.mkdir(parents=True)
        except FileExistsError:
            raise StorageError(f"{package} exists already, and nothing in it was changed.") from None
    words = {"name": name, "Class": "".join(part.capitalize() for part in name.split("_"))}
    files = {"pyproject.toml": "pyproject", f"{name}.py": "method", f"test_{name}.py": "test"}
    for file, template in files.items():
        text = (TEMPLATES / f"{template}.template").read_text(encoding="utf-8")
        write_text(package / file, Template(text).substitute(words))
    return [package / file for file in files]
