"""Texts in an event loop: it goes on meanwhile, and tasks that are cancelled end their texts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rlx
from rlx.errors import OptionError
from rlx.llm.model import LanguageModel


def test_pieces_come_while_the_loop_goes_on(llm: LanguageModel, path: Path) -> None:
    wanted = list(llm.generate("hello", 30, ignore_eos=True))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[str]:
        other = asyncio.create_task(tick())
        pieces = [piece async for piece in await llm.agenerate("hello", 30, ignore_eos=True)]
        other.cancel()
        return pieces

    assert asyncio.run(main()) == wanted
    assert ticks > 30


def test_a_cancelled_task_ends_its_text(llm: LanguageModel) -> None:
    async def main() -> None:
        made = await llm.agenerate("hello", ignore_eos=True)

        async def write() -> None:
            async for _ in made:
                pass

        task = asyncio.create_task(write())
        while not made.ids:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.finish_reason == "cancelled"
        next(llm.generate("hello", 2, ignore_eos=True))  # nothing is at work any more

    asyncio.run(main())


def test_chats_several_texts_and_errors(talking: Path) -> None:
    llm = rlx.load_llm(talking, device="cpu", slots=2)

    async def main() -> None:
        said = [{"role": "user", "content": "hello"}]
        pieces = [piece async for piece in await llm.achat(said, 5)]
        assert pieces == list(llm.chat(said, 5))
        together = llm.generate_many(["a", "b"], 4, ignore_eos=True)
        async for number, _ in together:
            assert number in (0, 1)
        assert [len(made.ids) for made in together.generations] == [4, 4]
        with pytest.raises(OptionError):
            await llm.agenerate([])

    asyncio.run(main())
