"""One version, measured: each hint's gap, whether open wishes are still done, and whether
everything else is preserved. This decides the fates of hints and whether training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from opd.rehearsal.measuring.fate import PLATEAU, closed_below, fate_of
from opd.rehearsal.measuring.measuring import Measurer, Practice, Wish
from opd.rehearsal.measuring.open_wishes import (
    ENOUGH_ANSWERS,
    LOOK_BACK,
    obedience_of,
    spare_wishes_against,
    together,
    why_failed,
    wishes_against,
    wishes_in_turn,
)
from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.preparing.keeping import Keeping
from opd.rehearsal.preparing.preparing import PreparedHint
from records.hints.types import Hint, HintStatus
from records.lessons.names import LessonDrop
from records.types import TurnRecord
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import (
    Gap,
    Obedience,
    Rate,
    Uptake,
    falls_clearly_short,
    is_obedient,
    pooled,
    summed,
)
from rollout_bridge.rehearsal.journal import (
    GapRow,
    Journal,
    MeasuredHint,
    ObedienceRow,
    PooledRow,
    RateRow,
    VersionRow,
    measured_of,
    uptake_of,
)
from rollout_bridge.rehearsal.recovery import deep_falls
from rollout_bridge.stop_order import StopOrder
from rollout_bridge.together import all_or_none, both

logger = logging.getLogger(__name__)

_LEAST_OF_A_HINT = ENOUGH_ANSWERS // LOOK_BACK
"""Fewest open wishes against each hint at a version, however many hints there are."""
_UNGUARDED = 16
"""Answers per version to open wishes that also train, if a hint has no others: shown, not a guard.
"""
_LOOK_AGAIN = 2
"""A version that seems to have lost open wishes is asked as many again, at most so many times, and
all its answers count.
"""
_CLEARLY = 1.5
"""It is not asked again once it falls short by more than so many standard errors. By binomial
chance, 64 answers of a policy that lost nothing fall short in 10% of versions, where the start does
nine tenths, and all of these looks in 1.4%; one that lost a tenth is found as often (80 and 77%),
by 111 answers on average.
"""
_RESTING_A_VERSION = 4
"""Hints at rest whose gap is measured at one version, in turn."""


class Review:
    """Measures versions and hints, and stores what follows. Raises ServiceUnavailable and
    StoreUnavailable; then nothing about the version is written, and it is measured again.
    """

    def __init__(
        self,
        store: RehearsalStore,
        measurer: Measurer,
        keeping: Keeping,
        journal: Journal,
        config: RehearsalConfig,
    ) -> None:
        self._store, self._measurer, self._keeping = store, measurer, keeping
        self._journal, self._config = journal, config
        self._rows = lineage(journal.rows)
        self._returned = {hint_id for row in journal.rows for hint_id in row.returned}

    def last(self) -> VersionRow | None:
        """The newest version that was measured."""
        return self._journal.rows[-1] if self._journal.rows else None

    @property
    def returned(self) -> Collection[str]:
        """Ended hints whose states are as at the start, or cannot be brought back further."""
        return self._returned

    def disobeyed(self, hint_ids: Iterable[str]) -> set[str]:
        """Those against which open wishes are done too seldom."""
        found = {one: obedience_of(one, self._rows, None, self._config) for one in hint_ids}
        return {
            hint_id
            for hint_id, one in found.items()
            if one is not None and one.rate.value < one.floor
        }

    async def version(
        self,
        version: int,
        hints: Sequence[PreparedHint],
        kept: Sequence[TurnRecord],
        ended: Sequence[Hint] = (),
    ) -> VersionRow:
        """Measure a version, store the fates of its hints, and write its row. What `ended` hints
        taught must still be undone.
        """
        config = self._config
        given_up = await self._store.versions_given_up()
        is_start = await self._store.is_start(version)
        self._rows = lineage(self._journal.rows, given_up, before=version)
        lists = [wishes_against(one) for one in hints]
        spare = [spare_wishes_against(one) for one in hints] if config.without_counter else []
        spare_wishes = wishes_in_turn(spare, _UNGUARDED, begin=version * _UNGUARDED)
        measured = self._to_measure(hints, version)
        # All at once, because an engine answers many in little more time than a few.
        [of_hints, unguarded], (keep, practices) = await both(
            all_or_none(
                [
                    self._obedience(lists, version, is_start=is_start),
                    self._measurer.obedience(spare_wishes),
                ]
            ),
            both(
                self._measurer.keep_gap(kept, config.keep_samples, version),
                all_or_none([self._practice(one, version) for one in measured]),
            ),
        )
        obedience = summed(list(of_hints.values()))
        obeys = obedience is None or is_obedient(obedience, config.obedience_floor)
        rows = await self._hints(measured, practices, of_hints, version_obeys=obeys)
        earlier = [row.obedience for row in self._rows if row.obedience is not None]
        so_far = [one.obedience() for one in earlier]
        so_far += [obedience] if obedience is not None else []
        latest = so_far[-config.obedience_versions :]
        of_latest = pooled(latest, floor=config.obedience_floor)
        returned, going_back = await self._returned_now(hints, ended, version)
        (_, objections), turns = await self._store.num_judged(), await self._store.counts()
        lessons = await self._store.lesson_counts()
        row = VersionRow(
            time=time.time(),
            version=version,
            turns=sum(turns.values()),
            objections=objections,
            hints=rows,
            obedience=None if obedience is None else ObedienceRow.of(obedience),
            obedience_of={hint_id: ObedienceRow.of(one) for hint_id, one in of_hints.items()},
            pooled=PooledRow.of(of_latest),
            keep=GapRow.of(keep),
            lessons={f"{kind.value}/{state.value}": n for (kind, state), n in lessons.items()},
            returned=returned,
            going_back=going_back,
            unguarded_of={hint_id: ObedienceRow.of(one) for hint_id, one in unguarded.items()},
            unmeasured=tuple(
                one.hint.hint_id for one in hints if config.without_counter and not one.open_wishes
            ),
            is_start=is_start,
            failure=None if is_start else why_failed(latest, of_latest),
        )
        self._rows.append(row)
        falls = deep_falls(self._rows, config.obedience_floor)
        row = row.model_copy(update={"deep_falls": falls})  # its own fall counts too
        self._rows[-1] = row
        self._journal.add(row)
        self._returned.update(returned)
        return row

    async def _hints(
        self,
        measured: Sequence[PreparedHint],
        practices: Sequence[Practice],
        of_hints: Mapping[str, Obedience],
        *,
        version_obeys: bool,
    ) -> tuple[MeasuredHint, ...]:
        """What this version means for each hint, see `_hint`."""
        starts = await all_or_none([self._of_start(one) for one in measured])
        rows = [
            await self._hint(
                one,
                found,
                of_hints.get(one.hint.hint_id),
                of_start=of_start,
                version_obeys=version_obeys,
            )
            for one, found, of_start in zip(measured, practices, starts, strict=True)
        ]
        return tuple(rows)

    async def _obedience(
        self, of_hints: Sequence[Sequence[Wish]], version: int, *, is_start: bool
    ) -> dict[str, Obedience]:
        """Obedience to open wishes, by the hint that they are against; asked again if it seems to
        have fallen.
        """
        floor = self._config.obedience_floor
        count = max(self._config.obedience_samples, _LEAST_OF_A_HINT * sum(map(bool, of_hints)))
        found: dict[str, Obedience] = {}
        for look in range(1 + _LOOK_AGAIN):
            wishes = wishes_in_turn(of_hints, count, begin=(version + look) * count)
            found = together(found, await self._measurer.obedience(wishes))
            one = summed(list(found.values()))
            if one is None or is_start or not one.is_judged or is_obedient(one, floor):
                break
            logger.info("version %d does %d of %d open wishes", version, one.followed, one.asked)
            if falls_clearly_short(one, floor, _CLEARLY):
                break
        return found

    async def hint(self, one: PreparedHint, version: int) -> MeasuredHint:
        """Measure one hint that became ready since its version was measured."""
        return await self._hint(one, await self._practice(one, version))

    async def _practice(self, one: PreparedHint, version: int) -> Practice:
        number = self._config.gap_samples
        return await self._measurer.practice(one.measured_at, one.hint.text, number, version)

    async def _of_start(self, one: PreparedHint) -> tuple[Rate | None, Rate | None]:
        """In how many answers the start model does what the hint asks, without and with it; asked
        once.
        """
        known = [row for row in measured_of(one.hint.hint_id, self._rows) if row.done is not None]
        if known:
            start, hinted = known[-1].done_start, known[-1].done_hinted
            return start and start.rate(), hinted and hinted.rate()
        number = self._config.start_samples
        return await self._measurer.of_start(one.measured_at, one.hint.text, number)

    async def _hint(
        self,
        one: PreparedHint,
        found: Practice,
        obedience: Obedience | None = None,
        *,
        of_start: tuple[Rate | None, Rate | None] = (None, None),
        version_obeys: bool = True,
    ) -> MeasuredHint:
        """Store a hint's gap and what follows from it. `obedience`: open wishes against it at this
        version, which is not in the journal yet; `of_start`: see `_of_start`; `version_obeys`: the
        version does enough open wishes.
        """
        hint, config, gap = one.hint, self._config, found.gap
        done_start, done_hinted = map(RateRow.of, of_start)
        is_first = hint.first_gap is None
        first_gap = gap.value if is_first and gap is not None else hint.first_gap
        if gap is not None:
            await self._store.set_hint_gap(
                hint.hint_id, gap=gap.value, gap_high=gap.high, first=is_first
            )
        active_from, rested_at = self._active_from(hint), self._rested_at(hint)
        done = obedience_of(hint.hint_id, self._rows, obedience, config)
        measured = MeasuredHint(
            hint_id=hint.hint_id,
            status=hint.status,
            gap=GapRow.of(gap),
            first_gap=first_gap,
            held_back=bool(one.held_back),
            num_steps=hint.num_steps,
            active_from=active_from,
            done=RateRow.of(found.done),
            done_start=done_start,
            done_hinted=done_hinted,
        )
        fate = fate_of(
            hint,
            gap,
            first_gap,
            active_from,
            config,
            done,
            uptake=self._uptake(measured),
            version_obeys=version_obeys,
            earlier=self._gaps_while_active(hint),
            rested_at=rested_at,
        )
        status = hint.status
        if fate is not None:
            await self._store.set_hint_status(hint.hint_id, fate.status, fate.detail)
            logger.info("hint %s is %s: %s", hint.hint_id, fate.status.value, fate.detail)
            status = fate.status
            rested_at = None
            if status is HintStatus.ACTIVE:
                active_from = hint.num_steps
            else:
                rested_at = None if gap is None else gap.value
                await self._store.drop_lessons_of(hint.hint_id, LessonDrop.HINT_ENDED)
        rested_at = rested_at if status is HintStatus.RESTING else None
        return measured.model_copy(
            update={"status": status, "active_from": active_from, "rested_at": rested_at}
        )

    def _uptake(self, now: MeasuredHint) -> Uptake | None:
        """By as many versions as a plateau has, this one included."""
        return uptake_of([*measured_of(now.hint_id, self._rows[-PLATEAU:]), now])

    def stop_order(self, row: VersionRow) -> StopOrder | None:
        """The order to stop training, if obedience has fallen or can no longer be measured."""
        if row.failure is None:
            return None
        passed = [
            one.version
            for one in self._rows
            if one.failure is None
            and one.pooled is not None
            and (one.pooled.passed or one.has_start_weights)
        ]
        back = f"version {passed[-1]} was the last that passed" if passed else "none has passed"
        return StopOrder(
            reason=f"{row.failure}; measured at version {row.version}, {back}",
            serve_version=passed[-1] if passed else None,
        )

    def _to_measure(self, hints: Sequence[PreparedHint], version: int) -> list[PreparedHint]:
        resting = [one for one in hints if one.hint.status is not HintStatus.ACTIVE]
        begin = version * _RESTING_A_VERSION
        chosen = [
            resting[(begin + i) % len(resting)]
            for i in range(min(len(resting), _RESTING_A_VERSION))
        ]
        return [one for one in hints if one.hint.status is HintStatus.ACTIVE] + chosen

    def _active_from(self, hint: Hint) -> int:
        for row in reversed(self._rows):
            for one in row.hints:
                if one.hint_id == hint.hint_id:
                    has_come_back = (
                        hint.status is HintStatus.ACTIVE and one.status is not HintStatus.ACTIVE
                    )
                    return hint.num_steps if has_come_back else one.active_from
        return 0

    def _rested_at(self, hint: Hint) -> float | None:
        """The hint's gap when it came to rest: in the last row that has the hint."""
        if hint.status is not HintStatus.RESTING:
            return None
        rows = (one for row in reversed(self._rows) for one in row.hints)
        return next((one.rested_at for one in rows if one.hint_id == hint.hint_id), None)

    def _gaps_while_active(self, hint: Hint) -> list[float]:
        """The hint's gaps at the last LOOK_BACK versions, as far back as it was active, oldest
        first; the last measurement of a version counts.
        """
        found: dict[int, float] = {}
        for row in reversed(self._rows[-LOOK_BACK:]):
            of_hint = [one for one in row.hints if one.hint_id == hint.hint_id]
            if of_hint and of_hint[0].status is not HintStatus.ACTIVE:
                break
            if of_hint and of_hint[0].gap is not None:
                found.setdefault(row.version, of_hint[0].gap.value)
        return list(reversed(found.values()))

    async def _returned_now(
        self, hints: Sequence[PreparedHint], ended: Sequence[Hint], version: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Ended hints at whose states the policy now answers like the start model again; and those
        at whose states it does not yet.
        """
        returned: list[str] = []
        going_back: list[str] = []
        of_ended = self._keeping.ended(ended, hints)
        for hint in ended:
            if hint.hint_id not in of_ended:
                continue  # ended just now: its states have not been chosen yet
            turns = await self._store.load_turns(of_ended[hint.hint_id])
            turns = [turn for turn in turns if len(turn.prompt_ids)]
            gap = await self._measurer.keep_gap(turns, self._config.keep_samples, version)
            tries = sum(hint.hint_id in row.going_back for row in self._rows)
            if not turns:
                logger.info("hint %s: no state is left to restore", hint.hint_id)
            elif gap is not None and _is_back(hint, gap, self._config):
                logger.info(
                    "hint %s: its states are answered like the start model again", hint.hint_id
                )
            elif tries >= self._config.max_steps:
                logger.warning("hint %s: %d steps have not undone it", hint.hint_id, tries)
            else:
                going_back.append(hint.hint_id)
                continue
            returned.append(hint.hint_id)
        return tuple(returned), tuple(going_back)


def lineage(
    rows: Sequence[VersionRow], given_up: Collection[int] = (), before: int | None = None
) -> list[VersionRow]:
    """The last measurement of each version that this one (`before`) descends from; by default of
    all. Versions that were rolled back say nothing about it.
    """
    newest = {
        row.version: row
        for row in rows
        if row.version not in given_up and (before is None or row.version < before)
    }
    return [newest[version] for version in sorted(newest)]


def _is_back(hint: Hint, gap: Gap, config: RehearsalConfig) -> bool:
    return gap.high <= closed_below(hint.first_gap or 0.0, config)
