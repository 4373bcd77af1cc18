"""Long polls: no change is missed, however it falls between a question and the wait for the next change."""

from __future__ import annotations

import asyncio
import time

from swe_lightning.gateway.changes import Changes


def test_a_change_during_the_question_is_not_missed() -> None:
    async def scenario() -> None:
        changes, answers = Changes(), iter([[], ["found"]])
        changes.bind()

        def ask() -> list[str]:
            answer = next(answers)
            if not answer:
                changes.notify()  # committed just after the question was answered
                time.sleep(0.05)
            return answer

        started = time.monotonic()
        assert await changes.poll(ask, bool, 20) == ["found"]
        assert time.monotonic() - started < 10

    asyncio.run(scenario())


def test_a_poll_ends_with_its_time_and_with_the_gateway() -> None:
    async def scenario() -> None:
        changes = Changes()
        changes.bind()
        assert await changes.poll(lambda: [], bool, 0.05) == []
        waiting = asyncio.ensure_future(changes.poll(lambda: [], bool, 50))
        await asyncio.sleep(0.05)
        changes.close()
        assert await asyncio.wait_for(waiting, 10) == []

    asyncio.run(scenario())
