"""New hints of the memory, examined by the tool lab's model on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from examples.tool_lab.domain import TOOLS
from judge.config import JudgeConfig
from judge.hints.examiner import HintExaminer
from judge.hints.questions import HintQuestions
from judge.hints.said import SourceCheck
from judge.votes.calls import judge_client
from records.hints.types import Hint, HintStatus, PromptKind, RehearsalBlock
from records.names import TurnState
from records.store import Store
from records.types import TurnRecord
from rollout_bridge.config import ClaimLoopConfig
from tests.examples.shipped import MODEL
from tests.opd.rehearsal.builders import a_state
from tests.records.builders import OWNER, a_session, a_turn, a_verdict, a_vote, claimed

CELSIUS, ALSO_CELSIUS = "Give temperatures in Celsius.", "Answer in Celsius."
FAHRENHEIT = "Give temperatures in Fahrenheit."
PRICE = "Sort hotels by price."
ONCE = "Use city Brakol in the call."
SAID = {
    CELSIUS: "No, I want it in Celsius.",
    ALSO_CELSIUS: "I prefer Celsius.",
    FAHRENHEIT: "No, I want it in Fahrenheit.",
    PRICE: "I want them sorted by price.",
    ONCE: '{"error": "unknown city Brakl"}',
}


def config_of(url: str, exception_texts: int = 3) -> JudgeConfig:
    loop = ClaimLoopConfig(poll_min_s=0.02, poll_max_s=0.05, pause_min_s=0.05, concurrency=1)
    return JudgeConfig(
        base_url=url,
        model=str(MODEL),
        temperature=0.0,
        max_tokens=48,
        votes=3,
        exception_texts=exception_texts,
        loop=loop,
    )


async def said(store: Store, scope: str = "key") -> str:
    """A turn, recorded now."""
    turn = a_turn(await a_session(store, scope), tools=TOOLS)
    await store.record_turn(turn, scope=scope)
    return turn.turn_id


async def remembered(
    store: Store,
    text: str,
    scope: str = "key",
    num_positive: int = 3,
    at: str | None = None,
    words: str | None = None,
) -> Hint:
    """A hint of a turn of its own, not examined yet."""
    turn_id = at or await said(store, scope)
    assert await store.set_next_state(turn_id, [{"role": "user", "content": words or SAID[text]}])
    assert await claimed(store, TurnState.JUDGING) == [turn_id]
    votes = tuple(a_vote(at, score=1 if at < num_positive else -1) for at in range(3))
    assert await store.commit_verdict(OWNER, a_verdict(turn_id, text, votes), None)
    [hint] = [one for one in await store.hints(scope=scope) if one.text == text]
    return hint


async def examined(
    store: Store, config: JudgeConfig, *hints: Hint, check: SourceCheck | None = None
) -> list[Hint]:
    """The hints after an examiner has looked at all of them."""
    async with judge_client(config) as client:
        questions = HintQuestions(client, config)
        examiner = HintExaminer(store, questions, config, "examiner", check=check)
        stop = asyncio.Event()
        working = asyncio.create_task(examiner.loop.run(stop))
        try:
            async with asyncio.timeout(120):
                while True:
                    found = [await store.hint(one.hint_id) for one in hints]
                    known = [one for one in found if one is not None and is_examined(one)]
                    if len(known) == len(hints):
                        return known
                    await asyncio.sleep(0.05)
        finally:
            stop.set()
            await working


def is_examined(hint: Hint) -> bool:
    return hint.is_rule is not None or hint.status is not HintStatus.ACTIVE


async def test_a_rule_gets_texts_for_its_exceptions(store: Store, lab_engine: str) -> None:
    hint = await remembered(store, CELSIUS)
    [known] = await examined(store, config_of(f"{lab_engine}/v1", exception_texts=12), hint)
    assert (known.status, known.is_rule, known.block) == (HintStatus.ACTIVE, True, None)
    prompts = await store.hint_prompts(hint.hint_id)
    wishes = [one for one in prompts if one.kind is PromptKind.OPPOSITE]
    assert wishes
    assert all("Fahrenheit" in one.text for one in wishes)
    assert [one.held_out for one in wishes].count(True) == max(len(wishes) // 3, 1)
    others = [one for one in prompts if one.kind is PromptKind.OUTSIDE]
    assert others
    assert not any("ahrenheit" in one.text or "elsius" in one.text for one in others)


async def test_a_rule_that_is_examined_again_gets_further_texts(
    store: Store, lab_engine: str
) -> None:
    config = config_of(f"{lab_engine}/v1", exception_texts=6)
    [hint] = await examined(store, config, await remembered(store, CELSIUS))
    first = await store.hint_prompts(hint.hint_id)
    assert await store.examine_again(hint.hint_id)
    assert not await store.examine_again(hint.hint_id), "it waits already"
    [again] = await examined(store, config, hint)
    assert (again.status, again.is_rule, again.block) == (HintStatus.ACTIVE, True, None)
    prompts = await store.hint_prompts(hint.hint_id)
    assert {one.prompt_id for one in first} <= {one.prompt_id for one in prompts}
    assert len({one.text for one in prompts}) == len(prompts), "none is written twice"
    by_kind = [[one.kind for one in of] for of in (first, prompts)]
    assert by_kind[0].count(PromptKind.OUTSIDE) == by_kind[1].count(PromptKind.OUTSIDE)


async def test_the_same_wish_in_other_words_is_one_hint(store: Store, lab_engine: str) -> None:
    config = config_of(f"{lab_engine}/v1")
    [first] = await examined(store, config, await remembered(store, CELSIUS))
    [second] = await examined(store, config, await remembered(store, ALSO_CELSIUS))
    assert (second.status, second.merged_into) == (HintStatus.MERGED, first.hint_id)
    assert len(await store.hint_sources(first.hint_id)) == 2


async def test_the_newer_of_two_opposites_holds(store: Store, lab_engine: str) -> None:
    config = config_of(f"{lab_engine}/v1")
    [other] = await examined(store, config, await remembered(store, PRICE))
    [old] = await examined(store, config, await remembered(store, CELSIUS))
    [new] = await examined(store, config, await remembered(store, FAHRENHEIT))
    old, other = [one for one in [await store.hint(h.hint_id) for h in (old, other)] if one]
    assert (old.status, old.opposed_by) == (HintStatus.CONTRADICTED, new.hint_id)
    assert (new.status, other.status) == (HintStatus.ACTIVE, HintStatus.ACTIVE)


@pytest.mark.parametrize(
    ("num_positive", "words", "block"),
    [
        (1, None, RehearsalBlock.NO_MAJORITY),
        (3, "Can you book 14 nights at Bmokvux?", RehearsalBlock.NOT_A_RULE),
    ],
)
async def test_what_is_no_rule_ends_none(
    store: Store, lab_engine: str, num_positive: int, words: str | None, block: RehearsalBlock
) -> None:
    config = config_of(f"{lab_engine}/v1")
    [rule] = await examined(store, config, await remembered(store, CELSIUS))
    slip = await remembered(store, FAHRENHEIT, num_positive=num_positive, words=words)
    [other] = await examined(store, config, slip)
    assert (other.is_rule, other.block) == (False, block)
    holds = await store.hint(rule.hint_id)
    assert holds is not None
    assert (holds.status, holds.opposed_by) == (HintStatus.ACTIVE, None)


async def test_of_two_opposites_the_one_said_last_holds_though_it_was_judged_first(
    store: Store, lab_engine: str
) -> None:
    config = config_of(f"{lab_engine}/v1")
    first = await said(store)
    [new] = await examined(store, config, await remembered(store, CELSIUS))
    [old] = await examined(store, config, await remembered(store, FAHRENHEIT, at=first))
    assert (old.status, old.opposed_by) == (HintStatus.CONTRADICTED, new.hint_id)
    assert old.is_rule is None
    holds = await store.hint(new.hint_id)
    assert holds is not None
    assert holds.status is HintStatus.ACTIVE


async def test_a_rule_that_requests_are_misread_for_gives_way_to_one_that_was_said(
    store: Store, lab_engine: str
) -> None:
    """The judge may read the old wish out of an answer that goes against it, whatever is said."""
    config = config_of(f"{lab_engine}/v1")
    await examined(store, config, await remembered(store, CELSIUS))
    at = await said(store)
    misread = await remembered(store, ALSO_CELSIUS, words="Please reserve 3 nights at Anqelk.")
    await examined(store, config, misread)
    new = await remembered(store, FAHRENHEIT, at=at)
    [old] = [one for one in await store.hints(scope="key") if one.text == CELSIUS]
    newest = (await store.hint_sources(old.hint_id))[0]
    assert newest.words == "Please reserve 3 nights at Anqelk."
    [holds] = await examined(store, config, new)
    gone = await store.hint(old.hint_id)
    assert gone is not None
    assert (holds.status, holds.is_rule) == (HintStatus.ACTIVE, True)
    assert (gone.status, gone.opposed_by) == (HintStatus.CONTRADICTED, new.hint_id)


async def unsaid(turn: TurnRecord, hint: str, words: str) -> float | None:
    """A teacher that cannot say whether words speak of a hint."""
    return None


def checking(fall: Callable[[TurnRecord, str], Awaitable[float | None]]) -> SourceCheck:
    """A teacher with these falls."""
    return SourceCheck(fall=fall, least=0.5, part_of_words=unsaid)


def speaking(*spoken: str) -> SourceCheck:
    """A teacher to whom these words alone speak of their hints."""

    async def fall(turn: TurnRecord, hint: str) -> float | None:
        return 6.0 if hint in turn.candidates else 0.0

    async def share(turn: TurnRecord, hint: str, words: str) -> float | None:
        return 0.9 if words in spoken else 0.02

    return SourceCheck(fall=fall, least=0.5, part_of_words=share)


ASKED = "We always want Celsius."
MISREAD = "I would rather have degrees Fahrenheit next time."
"""What the judge takes for a rule, whatever the teacher says of it."""


async def test_what_words_speak_of_holds_against_what_a_judge_reads_later(
    store: Store, lab_engine: str
) -> None:
    config, check = config_of(f"{lab_engine}/v1"), speaking(ASKED)
    asked = await remembered(store, CELSIUS, words=ASKED)
    [rule] = await examined(store, config, asked, check=check)
    assert rule.is_rule
    [later] = await examined(
        store, config, await remembered(store, FAHRENHEIT, words=MISREAD), check=check
    )
    assert (later.status, later.opposed_by) == (HintStatus.CONTRADICTED, rule.hint_id)
    holds = await store.hint(rule.hint_id)
    assert holds is not None
    assert holds.status is HintStatus.ACTIVE


async def test_what_words_speak_of_ends_what_a_judge_read_before(
    store: Store, lab_engine: str
) -> None:
    config = config_of(f"{lab_engine}/v1")
    [old] = await examined(store, config, await remembered(store, FAHRENHEIT, words=MISREAD))
    assert old.is_rule
    new = await remembered(store, CELSIUS, words=ASKED)
    [rule] = await examined(store, config, new, check=speaking(ASKED))
    ended = await store.hint(old.hint_id)
    assert ended is not None
    assert (ended.status, ended.opposed_by) == (HintStatus.CONTRADICTED, rule.hint_id)


async def test_words_that_change_nothing_of_the_answer_need_a_second_user(
    store: Store, lab_engine: str
) -> None:
    config, check = config_of(f"{lab_engine}/v1"), speaking()
    [known] = await examined(
        store, config, await remembered(store, FAHRENHEIT, words=MISREAD), check=check
    )
    assert (known.is_rule, known.block) == (False, RehearsalBlock.UNCONFIRMED)
    again = await remembered(store, FAHRENHEIT, words="We always want Fahrenheit.")
    assert (again.hint_id, again.is_rule) == (known.hint_id, None)
    [known] = await examined(store, config, again, check=check)
    assert (known.is_rule, known.block) == (True, None)


async def test_the_words_of_each_session_are_asked_about(store: Store, lab_engine: str) -> None:
    """The judge finds no rule in the newest ones, though in older ones."""
    first = await remembered(store, FAHRENHEIT, words="We always want Fahrenheit.")
    hint = await remembered(store, FAHRENHEIT, words="Can you book 14 nights at Bmokvux?")
    assert hint.hint_id == first.hint_id
    [known] = await examined(store, config_of(f"{lab_engine}/v1"), hint)
    assert (known.is_rule, known.block) == (True, None)


async def test_a_misread_objection_contradicts_nothing(store: Store, lab_engine: str) -> None:
    """The hint that the judge misread asks for what the answer did: it has no source."""
    right = await remembered(store, CELSIUS)
    wrong = await remembered(store, FAHRENHEIT)
    [misread] = await store.hint_sources(wrong.hint_id)
    asked: list[tuple[str, str]] = []

    async def fall(turn: TurnRecord, hint: str) -> float | None:
        asked.append((turn.turn_id, hint))
        return 0.01 if turn.turn_id == misread.turn_id else 6.0

    check = checking(fall)
    [known] = await examined(store, config_of(f"{lab_engine}/v1"), right, check=check)
    await until_gone(store, wrong, lab_engine, check)
    assert await store.hint(wrong.hint_id) is None
    again = await store.hint(right.hint_id)
    assert again is not None
    assert (again.status, again.is_rule, known.block) == (HintStatus.ACTIVE, True, None)
    assert (misread.turn_id, FAHRENHEIT) in asked


@pytest.mark.parametrize(
    ("falls", "left"),
    [
        ({"a": 0.01, "b": 1.0, "c": 6.0}, ["c", "b"]),  # another vote has read it
        ({"a": 2.0, "b": 1.0, "c": 0.0}, ["a", "b"]),
        ({"a": 2.0, "b": 0.0, "c": 0.0}, []),  # most have not
        ({"a": None, "b": 0.0}, ["a"]),  # cannot be said
    ],
)
async def test_what_is_left_of_the_hints_of_a_turn(
    falls: dict[str, float | None], left: list[str]
) -> None:
    turn = a_state("t0", "Book it.", candidates=tuple(falls))

    async def fall(_: TurnRecord, hint: str) -> float | None:
        return falls[hint]

    assert await checking(fall).left(turn, "a") == left


@pytest.mark.parametrize("speaks", [True, False])
async def test_the_teacher_has_to_agree_that_two_hints_are_the_same(
    store: Store, lab_engine: str, speaks: bool
) -> None:
    """One that says nothing of the answer which the other came from is another hint."""
    config = config_of(f"{lab_engine}/v1")
    [known] = await examined(store, config, await remembered(store, CELSIUS))
    new = await remembered(store, ALSO_CELSIUS)

    async def fall(_: TurnRecord, hint: str) -> float | None:
        return 6.0 if speaks or hint == new.text else 0.0

    [found] = await examined(store, config, new, check=checking(fall))
    assert (found.merged_into == known.hint_id) is speaks
    assert (found.status is HintStatus.MERGED) is speaks


@pytest.mark.parametrize("speaks", [True, False])
async def test_the_teacher_has_to_agree_that_two_hints_are_opposites(
    store: Store, lab_engine: str, speaks: bool
) -> None:
    config = config_of(f"{lab_engine}/v1")
    [known] = await examined(store, config, await remembered(store, CELSIUS))
    new = await remembered(store, FAHRENHEIT)

    async def fall(_: TurnRecord, hint: str) -> float | None:
        return 6.0 if speaks or hint == new.text else 0.0

    await examined(store, config, new, check=checking(fall))
    older = await store.hint(known.hint_id)
    assert older is not None
    assert (older.status is HintStatus.CONTRADICTED) is not speaks


async def until_gone(store: Store, hint: Hint, lab_engine: str, check: SourceCheck) -> None:
    """Let an examiner work until the memory has the hint no more."""
    config = config_of(f"{lab_engine}/v1")
    async with judge_client(config) as client, asyncio.timeout(60):
        questions = HintQuestions(client, config)
        examiner = HintExaminer(store, questions, config, "examiner", check=check)
        stop = asyncio.Event()
        working = asyncio.create_task(examiner.loop.run(stop))
        while await store.hint(hint.hint_id) is not None:
            await asyncio.sleep(0.02)
        stop.set()
        await working


async def test_opposites_of_two_tenants_both_wait(store: Store, lab_engine: str) -> None:
    config = config_of(f"{lab_engine}/v1")
    [one] = await examined(store, config, await remembered(store, CELSIUS, "first"))
    [two] = await examined(store, config, await remembered(store, FAHRENHEIT, "second"))
    found = await store.hint(one.hint_id)
    assert found is not None
    assert found.status is two.status is HintStatus.ACTIVE
    assert found.block is two.block is RehearsalBlock.OTHER_SCOPE


async def test_a_slip_in_another_scope_pauses_nobodys_rule(store: Store, lab_engine: str) -> None:
    config = config_of(f"{lab_engine}/v1")
    slip = await remembered(store, FAHRENHEIT, "second", num_positive=1)
    [slipped] = await examined(store, config, slip)
    assert slipped.block is RehearsalBlock.NO_MAJORITY
    [rule] = await examined(store, config, await remembered(store, CELSIUS, "first"))
    assert (rule.is_rule, rule.block) == (True, None)
    found = await store.hint(slip.hint_id)
    assert found is not None
    assert found.block is RehearsalBlock.NO_MAJORITY


async def test_what_is_about_one_answer_is_not_rehearsed(store: Store, lab_engine: str) -> None:
    config = config_of(f"{lab_engine}/v1")
    [known] = await examined(store, config, await remembered(store, ONCE))
    assert (known.is_rule, known.block) == (False, RehearsalBlock.NOT_A_RULE)
    assert await store.hint_prompts(known.hint_id) == []


async def test_a_slip_of_one_vote_waits_for_a_second_objection(
    store: Store, lab_engine: str
) -> None:
    config = config_of(f"{lab_engine}/v1")
    [known] = await examined(store, config, await remembered(store, CELSIUS, num_positive=1))
    assert (known.is_rule, known.block) == (False, RehearsalBlock.NO_MAJORITY)
    again = await remembered(store, CELSIUS)
    assert (again.hint_id, again.is_rule) == (known.hint_id, None)
    [known] = await examined(store, config, again)
    assert (known.is_rule, known.block) == (True, None)


async def test_a_judge_that_stays_away_costs_no_hint(store: Store, lab_engine: str) -> None:
    config = config_of("http://127.0.0.1:9/v1").model_copy(update={"retries": 0})
    gone = config.model_copy(
        update={"loop": config.loop.model_copy(update={"give_up_after_s": 0.2, "max_attempts": 2})}
    )
    hint = await remembered(store, CELSIUS)
    [known] = await examined(store, gone, hint)
    assert (known.status, known.block) == (HintStatus.ACTIVE, RehearsalBlock.NOT_EXAMINED)
    assert "no vote got an answer" in (known.detail or "")
    again = await remembered(store, CELSIUS)
    assert again.is_rule is None
