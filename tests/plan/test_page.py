"""The page of a plan is well formed, needs no other file, and knows every buffer."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

from rlx.plan.interval import Interval
from rlx.plan.pack import pack
from rlx.plan.page import to_html

INTERVALS = [Interval("a</script>&", 0, 3, 4096), Interval("b", 1, 4, 1024), Interval("none", 0, 4, 0)]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page() -> None:
    page = to_html(INTERVALS, pack(INTERVALS), steps=["k0", "k1", "k2", "k3"])
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert not re.search(r"https?://|src=|@import", page.replace('xmlns="http://', ""))
    assert len([attrs for tag, attrs in tags.seen if tag == "rect" and attrs.get("class") == "b"]) == 2
    titles = [unescape(text) for text in re.findall(r"<title>(.*?)</title>", page, re.DOTALL)]
    assert titles[1] == "a</script>&\n4.00 KiB (4,096 B) at 0\nsteps 0 to 2\nmade by k0\nlast read by k2"
    assert "5.00 KiB" in page


def test_an_empty_plan_has_a_page() -> None:
    assert "Memory map: 0 B" in to_html([], pack([]))
