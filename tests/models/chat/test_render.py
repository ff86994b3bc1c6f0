"""Chat templates give what jinja2 gives, and none takes more time or memory than it may."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlx.errors import ModelFormatError, OptionError
from rlx.models.chat import child, render

pytest.importorskip("jinja2")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_sees_messages_as_they_are() -> None:
    messages = [{"role": "user", "content": "Grüße <b> & 'x' 🙂"}]
    text = render(CHATML, {"messages": messages, "add_generation_prompt": True})
    assert text == "<|im_start|>user\nGrüße <b> & 'x' 🙂<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ x | tojson }}", '{"a": "é<"}'),
        ("{{ x | tojson(indent=1) }}", '{\n "a": "é<"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("  {% if true %}\nx\n{% endif %}\ny\n", "x\ny"),
        ("{{ none_such is defined }}{{ none_such }}", "False"),
        ("{% set l = [] %}{% set _ = l.append(3) %}{{ l }}", "[3]"),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
        ("{{ x.__class__ is defined }}", "False"),
    ],
)
def test_what_model_files_use(template: str, expected: str) -> None:
    assert render(template, {"x": {"a": "é<"}}) == expected


DOUBLES = "{% set n = namespace(a='x' * 999) %}{% for i in range(90) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ 'x' * 10**9 }}", "256 MiB"),
        ("{{ 'x'.center(10**10) }}", "256 MiB"),
        ("{{ '%1000000000d' | format(1) }}", "256 MiB"),
        (DOUBLES, "256 MiB"),
        ("{{ 'x' * (1 << 25) }}", "syntax|Syntax"),
        ("{{ 'x' * 33000000 }}", "33000000 characters, more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 3000, "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("a\n{% if %}", r"TemplateSyntaxError.*line 2"),
        ("{% include 'x' %}", "no loader"),
        ("x" * (child.ANSWER // 4), "more than the limit of"),
    ],
)
def test_what_is_refused(template: str, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        render(template, {})
    assert render("{{ 1 + 1 }}", {}) == "2"  # the next one runs


def test_loops_without_end_are_stopped() -> None:
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelFormatError, match="mine: takes more than 2 s"):
        render(nested, {}, "mine")
    assert render("{{ 1 + 1 }}", {}) == "2"


@pytest.mark.parametrize("given", [{"x": object()}, {"x": {1, 2}}, {"x": b"a"}])
def test_variables_must_be_json(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="what JSON has"):
        render("a", given)


def test_threads_take_turns() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: render("{{ i * 2 }}", {"i": i}), range(200))) == [str(2 * i) for i in range(200)]


def test_files_of_high_numbers() -> None:
    """A server with more than 1,024 connections."""
    code = """if True:
        import os, resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most >= 1200:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1200, most))
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        from rlx.models.chat import render
        assert render("{{ 1 }}", {}) == "1"
    """
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_a_forked_child_has_a_process_of_its_own() -> None:
    code = """if True:
        import os
        from rlx.models.chat import render
        assert render("{{ 1 }}", {}) == "1"
        pid = os.fork()
        if pid == 0:
            assert render("{{ 2 }}", {}) == "2"
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert render("{{ 3 }}", {}) == "3"
    """
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
