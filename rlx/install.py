"""Commands that bring what is missing: packages, of a checkout or of others, and files of models."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["install_extra", "install_package", "instead_of"]

CHECKOUT = Path(__file__).parents[1]  # where this rlx lies, if it is a checkout
NAMES = ("rlx", "rlx-runtime")  # the distributions that this package may come from


def install_extra(name: str) -> str:
    """The command that installs an extra, such as "llm": of the checkout, or the packages that it stands for."""
    import re
    from shlex import quote

    if (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install {quote(f'{CHECKOUT}[{name}]')}"
    wanted = [line for line in _requirements() if re.search(rf"\bextra == ['\"]{name}['\"]", line)]
    wanted = [line for line in wanted if _platform(line) in ("", sys.platform)]
    if not wanted:  # of rlx-runtime
        return f"install rlx with its extra {name!r} in the place of rlx-runtime"
    return f"pip install {' '.join(map(_argument, wanted))}"


def install_package(name: str) -> str:
    """The command that installs one of the packages that rlx can use, in a version that it takes."""
    import re

    lines = [line for line in _requirements() if re.match(rf"{name}\b(?!-)", line)]
    return f"pip install {_argument(min(lines, key=len)) if lines else name}"


def _requirements() -> list[str]:
    """The lines `name<2,>=1; marker` of the installed distribution; none where rlx is only on the path."""
    from importlib.metadata import PackageNotFoundError, requires

    for name in NAMES:
        try:
            return requires(name) or []
        except PackageNotFoundError:
            pass
    return []


def _platform(line: str) -> str:
    """The system that a line is for; "" for all."""
    import re

    found = re.search(r"\bsys_platform == ['\"](\w+)['\"]", line)
    return found[1] if found else ""


def _argument(line: str) -> str:
    """A line as an argument of pip, without the conditions behind it."""
    from shlex import quote

    return quote(line.partition(";")[0].strip())


def instead_of(source: str) -> str:
    """What to do where a model file is not there but looks like an address or a name on a hub; empty for others."""
    if "://" in source:
        return ". rlx reads files, not addresses: download it first"
    owner, _, name = source.partition("/")
    is_name = owner and name and not set("/\\.~ ") & set(owner) and "/" not in name
    if not is_name or name.endswith((".onnx", ".gguf", ".safetensors", ".rlx", ".rlxart")):
        return ""
    from shlex import quote

    return f". If it is a name on a hub, download its files first: `hf download {quote(source)} --local-dir FOLDER`"
