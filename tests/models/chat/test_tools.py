"""Calls of tools are read out of answers however these are cut into pieces, and no text is lost."""

from __future__ import annotations

import json
import random

import pytest

from rlx.errors import OptionError
from rlx.models.chat import ToolCall, ToolCalls, tool_format

F = ToolCall("f", '{"x": 1}')
ONE = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
Expected = list[str | ToolCall]

CASES: list[tuple[str, str, Expected]] = [
    ("hermes", "Hello", ["Hello"]),
    ("hermes", 'a<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ["a", F]),
    ("hermes", f"{ONE}b{ONE}", [F, "b", F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
     [ToolCall("f", '{"x": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', [F]),
    ("hermes", "<tool_call>{broken</tool_call> x", ["<tool_call>{broken</tool_call> x"]),
    ("hermes", "if a <tool and <", ["if a <tool and <"]),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', [F]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}',
     [" ", F, F]),
    ("llama3", '{"name": "f", "parameters": {"x": "}{\\""}}', [ToolCall("f", '{"x": "}{\\""}')]),
    ("llama3", 'Use {"name": "f", "parameters": {}}', ['Use {"name": "f", "parameters": {}}']),
    ("llama3", '{"a": 1}', ['{"a": 1}']),
    ("llama3", '{"name": "f", "param', ['{"name": "f", "param']),
    ("llama3", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]', [F, F]),
    ("mistral", 'Well [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f{"x": 1}', ["Well ", F, F]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}', [F]),
    ("mistral", "[TOOL_CALLS] none", ["[TOOL_CALLS] none"]),
    ("mistral", "[TOOL", ["[TOOL"]),
]  # fmt: skip


def joined(parts: Expected) -> Expected:
    """Pieces of text that follow each other as one."""
    out: Expected = []
    for part in parts:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        elif part != "":
            out.append(part)
    return out


@pytest.mark.parametrize("name, text, expected", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str, text: str, expected: Expected) -> None:
    rng = random.Random(text)
    for trial in range(60):
        reader, out, at = ToolCalls(name), [], 0
        while at < len(text):
            size = 1 if trial == 0 else rng.choice([1, 2, 3, 7, 20, len(text)])
            out += reader.push(text[at : at + size])
            at += size
        assert joined(out + reader.finish()) == expected
        assert reader.finish() == []


def test_text_is_not_held_back() -> None:
    reader = ToolCalls("hermes")
    assert [reader.push(piece) for piece in ("Hello ", "x < y", "<")] == [["Hello "], ["x < y"], []]
    assert reader.push("tool") == []
    assert reader.push("s>") == ["<tools>"]
    reader = ToolCalls("llama3")
    assert reader.push("Hi") == ["Hi"]
    assert reader.push("{") == ["{"]


def test_a_call_comes_out_when_it_is_complete() -> None:
    reader = ToolCalls("llama3")
    assert reader.push('{"name": "f", "parameters": {"x": 1}') == []
    assert reader.push("}") == []  # another may follow
    assert reader.finish() == [F]
    reader = ToolCalls("hermes")
    assert reader.push('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>') == [F]


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_no_text_is_lost_and_time_is_linear(name: str) -> None:
    marks = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "f",
        " ",
        ";",
    ]
    for seed in range(300):
        rng = random.Random(seed)
        pieces = [rng.choice(marks) for _ in range(rng.randrange(40))]
        reader = ToolCalls(name)
        out = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        if not any(isinstance(part, ToolCall) for part in out):
            assert "".join(map(str, out)) == "".join(pieces)
    deep = '<tool_call>[TOOL_CALLS]{"a":' + "[" * 200_000
    reader = ToolCalls(name)
    out = [part for i in range(0, len(deep), 100) for part in reader.push(deep[i : i + 100])] + reader.finish()
    assert "".join(map(str, out)) == deep


def test_which_format_a_template_means() -> None:
    assert tool_format('<tool_call>\\n{"name": <n>, "arguments": <o>}') == "hermes"
    assert tool_format("<tool_call><function=x>arguments") is None
    assert tool_format("[TOOL_CALLS]") == "mistral"
    assert tool_format("ipython {'name': n, 'parameters': p}") == "llama3"
    assert tool_format("{{ messages }}") is None
    with pytest.raises(OptionError, match="there are hermes, llama3, mistral"):
        ToolCalls("xml")


def test_arguments_are_json() -> None:
    (call,) = ToolCalls("hermes").push('<tool_call>{"name": "f", "arguments": {"a": "ü\\n"}}</tool_call>')
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"a": "ü\n"}
    (call,) = ToolCalls("hermes").push('<tool_call>{"name": "f"}</tool_call>')
    assert call == ToolCall("f", "{}")
