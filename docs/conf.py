"""How Sphinx makes pages of these files: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "rlx"
author = "The authors of rlx"
release = version = re.findall(r'^__version__ = "(.+)"', (ROOT / "rlx" / "__init__.py").read_text(), re.MULTILINE)[0]

sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import api_reference  # noqa: E402

api_reference.PAGE.write_text(api_reference.page())

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
html_theme = "furo"
pygments_dark_style = "monokai"
html_title = f"rlx {release}"
html_copy_source = False
exclude_patterns = ["README.md"]
