"""Conversations: from messages to a prompt by the model's own template, and tool calls out of what it answers."""

from __future__ import annotations

from rlx.models.chat.render import render
from rlx.models.chat.tools import ToolCall, ToolCalls, tool_format

__all__ = ["ToolCall", "ToolCalls", "render", "tool_format"]
