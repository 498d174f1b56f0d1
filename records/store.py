"""The store: what every stage of a run reads and writes, and the only thing that they share.

A thin facade, as long as the list of things to ask of it: each write is an operation (`*_op` of the
modules beside this one) that the group writer commits before the method returns; each read runs on
a connection of its own. Turns move through `TurnState` only here. It decides nothing: who links,
judges, scores and trains are the callers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from records import (
    claims,
    deletion,
    diagnosis,
    echoes,
    feedback,
    feedback_writes,
    linking,
    loading,
    ready_samples,
    reconcile,
    replay_status,
    replaying,
    scores,
    sessions,
    side_samples,
    spilled,
    summary,
    training,
)
from records import turn_writes as turns
from records.config import StoreConfig
from records.database import is_transient, reader_engine, write_transactions
from records.diagnosis import RunFacts, SessionFacts
from records.errors import StoreUnavailable, UnknownTurn
from records.feedback import Feedback, KeptFeedback
from records.messages import Message
from records.reconcile import Chain, ReconcileReport
from records.redaction import Redactor
from records.replay_status import ReplayStatus
from records.replaying import PreparedSession
from records.schema import migrate_op
from records.spilled import Addition
from records.summary import ExampleTurn, VoteSummary
from records.types import (
    CapturedTurn,
    DropReason,
    Ids,
    PolicyScore,
    PolicyVersion,
    ReadySample,
    SampleResult,
    Score,
    SideSamples,
    TurnRecord,
    TurnRef,
    TurnState,
    Verdict,
    Vote,
)
from records.writer import GroupWriter, as_store_error

P = ParamSpec("P")
T = TypeVar("T")
Clock = Callable[[], float]

_READ_ATTEMPTS = 2
_IDLE_SESSIONS_PER_TRANSACTION = 200


def _writer(config: StoreConfig) -> GroupWriter:
    return GroupWriter(
        write_transactions(config), group_max=config.group_max, lock_retries=config.lock_retries
    )


async def _migrate(config: StoreConfig) -> None:
    # With a writer of its own: another process's migration of a large store is waited for.
    writer = _writer(config.patient())
    writer.start()
    try:
        await writer.run(migrate_op)
    finally:
        await writer.close()


class Store:
    """One process's door to the database. All methods may raise StoreUnavailable."""

    def __init__(self, config: StoreConfig, clock: Clock = time.time) -> None:
        self.config = config
        self._clock = clock
        self.redactor = Redactor(config.redaction)
        self._reader_engine = reader_engine(config)
        self.writer = _writer(config)

    @classmethod
    async def open(cls, config: StoreConfig, clock: Clock = time.time) -> Store:
        """Connect, migrate if needed, start the writer. `clock` gives unix seconds.

        Raises StoreUnavailable, or StoreSchemaError for a database of a newer program.
        """
        path = config.sqlite_path
        if path is not None and not path.parent.is_dir():
            raise StoreUnavailable(f"the folder of the database does not exist: {path.parent}")
        await _migrate(config)
        store = cls(config, clock)
        store.writer.start()
        return store

    async def close(self) -> None:
        """Commit what waits and disconnect."""
        await self.writer.close()
        await self._reader_engine.dispose()

    async def vacuum(self) -> None:
        """PostgreSQL: give deleted rows' room back, so that it is written over."""
        engine = reader_engine(self.config.patient())
        try:
            async with engine.connect() as connection:
                await connection.execute(text("VACUUM"))
        finally:
            await engine.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _write(
        self, operation: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self.writer.run(
            lambda connection: operation(connection, *args, **kwargs),
            operation.__name__.removesuffix("_op"),
        )

    async def _read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        for attempt in range(_READ_ATTEMPTS):
            try:
                async with self._reader_engine.connect() as connection:
                    return await connection.run_sync(query, *args, **kwargs)
            except (SQLAlchemyError, OSError) as error:
                # A pooled connection may have died since its last use; a second one is new.
                if not is_transient(error) or attempt + 1 == _READ_ATTEMPTS:
                    raise as_store_error(error) from error
        raise AssertionError("the last attempt returns or raises")

    # Sessions and linking (the proxy)

    async def ensure_session(
        self, *, scope: str, external_id: str | None, session_id: str | None = None
    ) -> str:
        """The id of a session, created if needed, and noted as seen (and open) now.

        `external_id` is the client's name for it, `session_id` ours; with neither it is a new one.
        Raises ValueError for a session of another scope.
        """
        if external_id is not None:
            session_id = await self._read(
                sessions.find_external, scope=scope, external_id=external_id
            )
        if session_id is not None:
            found = await self._read(sessions.find, session_id=session_id)
            if found is not None and found[0] != scope:
                raise ValueError(f"session {session_id!r} belongs to another scope")
            if found is not None and found[1] >= self._clock() - sessions.TOUCH_EVERY_S:
                return session_id
        return await self._write(
            sessions.ensure_op,
            scope=scope,
            external_id=external_id,
            session_id=session_id,
            now=self._clock(),
        )

    async def close_session(self, session_id: str, reason: str) -> int:
        """Close a session; its turns without next state -> dropped. Returns how many these are."""
        return await self._write(
            sessions.close_op, session_ids=[session_id], reason=reason, now=self._clock()
        )

    async def close_idle_sessions(self, idle_s: float) -> int:
        """Close all sessions not seen for `idle_s`. Returns the number of turns dropped."""
        dropped = 0
        while True:
            now = self._clock()
            limit = _IDLE_SESSIONS_PER_TRANSACTION
            if not await self._read(sessions.idle, before=now - idle_s, limit=1):
                return dropped
            closed, turns_dropped = await self._write(
                sessions.close_idle_op, before=now - idle_s, limit=limit, now=now
            )
            dropped += turns_dropped
            if closed < limit:
                return dropped

    async def find_known_nodes(self, scope: str, node_ids: Sequence[str]) -> set[str]:
        """Those of `node_ids` that are stored messages."""
        return await self._read(linking.known_nodes, scope=scope, node_ids=node_ids)

    async def turns_by_response_node(self, scope: str, node_ids: Sequence[str]) -> list[TurnRef]:
        """Turns whose response is one of these nodes, oldest first."""
        return await self._read(linking.by_response_node, scope=scope, node_ids=node_ids)

    async def turns_by_prompt_node(self, scope: str, node_id: str) -> list[TurnRef]:
        """Turns that answered exactly this prompt, oldest first."""
        return await self._read(linking.by_prompt_node, scope=scope, node_id=node_id)

    async def turns_by_fingerprint(
        self, scope: str, fingerprint: str, since: float, session_id: str | None = None
    ) -> list[TurnRef]:
        """Turns created since `since` (unix seconds) with this response, oldest first."""
        return await self._read(
            linking.by_fingerprint,
            scope=scope,
            fingerprint=fingerprint,
            since=since,
            session_id=session_id,
        )

    async def turns_by_id(self, scope: str, turn_ids: Sequence[str]) -> list[TurnRef]:
        """Those of these turns that exist in the scope, oldest first."""
        return await self._read(linking.by_turn_ids, scope=scope, turn_ids=turn_ids)

    async def session_of_nodes(self, scope: str, node_ids: Sequence[str]) -> str | None:
        """The session of the newest turn whose prompt or response is the deepest of these."""
        return await self._read(linking.session_of_nodes, scope=scope, node_ids=node_ids)

    async def recent_summaries(
        self, scope: str, rules: Sequence[str], since: float, limit: int
    ) -> list[tuple[str, Message]]:
        """(session, reply) of the newest side turns since `since` that these rules marked."""
        return await self._read(
            linking.recent_summaries, scope=scope, rules=rules, since=since, limit=limit
        )

    async def turn_tokens(self, turn_id: str) -> tuple[Ids, Ids]:
        """(prompt ids [P], response ids [R]). Raises UnknownTurn."""
        tokens = await self._read(loading.load_tokens, turn_ids=[turn_id])
        prompt_ids, response_ids, _ = tokens[turn_id]
        return prompt_ids, response_ids

    async def record_turn(self, turn: CapturedTurn, *, scope: str) -> None:
        """Store a turn as awaiting_next_state, or as dropped with its reason; durable on return.

        Raises ValueError if it is not dropped yet cannot train (no temperature, tokens or version,
        or a non-finite log-prob), names an unknown session or token parent, or does not share the
        ids that it says; StoreConflict if its id is taken.
        """
        if self.redactor.is_active:
            turn = await asyncio.to_thread(self.redactor.turn, turn, scope)
        prepared = turns.prepare(turn, scope=scope, now=self._clock())
        if turn.token_parent_id is not None:
            await self._check_shared(turn, turn.token_parent_id)
        await self.writer.run_bulk(turns.record_op, prepared, "record")

    async def _check_shared(self, turn: CapturedTurn, parent_id: str) -> None:
        """Compare ids where only a part of the parent is shared (the rest is checked by sum)."""
        total = await self._read(turns.token_count, turn_id=parent_id)
        if total is None or turn.num_shared_ids == total:
            return
        prompt_ids, response_ids = await self.turn_tokens(parent_id)
        turns.check_shared_part(turn, prompt_ids, response_ids)

    async def take_in(self, addition: Addition) -> bool:
        """Store what a request adds (turn, next state, session), all or nothing.

        Returns whether its turn is new; adding it again changes nothing. Raises as `record_turn`.
        """
        addition = await asyncio.to_thread(spilled.redacted, addition, self.redactor)
        return await self.writer.run_bulk(spilled.take_in_op, spilled.prepare(addition), "take_in")

    async def request_echo(self, scope: str, turn_id: str) -> dict[str, Any] | None:
        """What the client of this scope may read again of its request; None if nothing."""
        return await self._read(echoes.load, scope=scope, turn_id=turn_id)

    async def erase_request_echo(self, scope: str, turn_id: str) -> bool:
        """Let no client ask for this turn again; False if none could."""
        return await self._write(echoes.erase_op, scope=scope, turn_id=turn_id)

    async def set_next_state(self, turn_id: str, next_state: list[Message]) -> bool:
        """Give a turn its next state: awaiting_next_state or dropped(no_next_state) -> judging.

        A turn that was judged by feedback alone is judged again, unless the trainer has it. False,
        and nothing changes, for any other turn: a turn gets one next state.
        """
        if not next_state:
            raise ValueError(f"turn {turn_id}: a next state has at least one message")
        if self.redactor.is_active:
            next_state = await asyncio.to_thread(self.redactor.messages, next_state)
        wanted = turns.NextState(turn_id=turn_id, messages=next_state, now=self._clock())
        return await self.writer.run_bulk(turns.set_next_state_op, wanted, "set_next_state")

    async def add_feedback(self, scope: str, turn_id: str, said: Feedback) -> KeptFeedback | None:
        """Tie feedback to a turn; None if this scope has no such turn.

        The same again (by its external id, or by equal content) changes nothing. Raises
        StoreConflict if its external id names other feedback, TooMuchFeedback.
        """
        [message] = await asyncio.to_thread(self.redactor.messages, [said.message()])
        new = feedback_writes.NewFeedback(
            scope=scope,
            turn_id=turn_id,
            external_id=said.external_id,
            message=message,
            reward=said.reward,
            now=self._clock(),
        )
        return await self._write(feedback_writes.add_op, new=new)

    # Recorded sessions

    async def import_session(self, session: PreparedSession) -> int:
        """Store what is not there yet of a recorded session; returns how many turns are new."""
        return await self.writer.run_bulk(replaying.import_op, session, "import_session")

    async def is_deleted(self, session_id: str) -> bool:
        """Whether a session of this id was deleted: nothing of it is written again."""
        return await self._read(deletion.is_deleted, session_id=session_id)

    async def import_votes(self, turn_id: str, votes: Sequence[str]) -> bool:
        """Give a recorded turn its judge's answers; False if it is unknown, has them or went on."""
        imported = replaying.ImportedVotes(turn_id=turn_id, votes=tuple(votes), now=self._clock())
        return await self.writer.run_bulk(replaying.votes_op, imported, "import_votes")

    async def replay_status(self) -> ReplayStatus:
        """Where the recorded turns stand."""
        return await self._read(replay_status.replay_status)

    async def recorded_turns(self, scope: str, name: str) -> dict[int, str]:
        """Position -> turn id of the recorded session `name`; empty if there is none."""
        return await self._read(replay_status.recorded_turns, scope=scope, name=name)

    async def held_out_turns(self) -> list[str]:
        """Turns that were scored and kept from training."""
        return await self._read(replay_status.held_out_turns)

    async def trained_recordings(self) -> list[str]:
        """Turns of recordings that were trained on."""
        return await self._read(replay_status.trained_recordings)

    async def replace_by_sample(
        self, owner: str, turn_id: str, sample: CapturedTurn, *, scope: str
    ) -> bool:
        """A recorded turn in scoring -> dropped(resampled); `sample` takes its place and verdict.

        False, and nothing is written, if the claim is lost. Raises as `record_turn`.
        """
        prepared = turns.prepare(sample, scope=scope, now=self._clock())
        return await self._write(
            replaying.replace_op, owner=owner, turn_id=turn_id, sample=prepared
        )

    # Judge and scoring workers

    async def claim(
        self, state: TurnState, *, owner: str, limit: int, ttl_s: float
    ) -> list[TurnRecord]:
        """Claim up to `limit` turns in `judging` or `scoring` for `ttl_s` seconds.

        Oldest first, turns of one session together; claims past their deadline are free again.
        """
        if state not in claims.CLAIMABLE:
            raise ValueError(f"turns in state {state} are not claimed by workers")
        if limit < 1:
            raise ValueError(f"a claim asks for at least one turn, got {limit}")
        if not await self._read(claims.any_free, state=state, now=self._clock()):
            return []
        turn_ids = await self._write(
            claims.claim_op, state=state, owner=owner, limit=limit, now=self._clock(), ttl_s=ttl_s
        )
        return await self._read(loading.load_turns, turn_ids=turn_ids, skip_unknown=True)

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> int:
        """Hold claims for another `ttl_s` from now; returns how many are still the owner's."""
        until = self._clock() + ttl_s
        return await self._write(claims.extend_op, owner=owner, turn_ids=turn_ids, until=until)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> int:
        """Give claims back; returns how many were still the owner's."""
        return await self._write(claims.release_op, owner=owner, turn_ids=turn_ids)

    async def commit_verdict(
        self,
        owner: str,
        verdict: Verdict,
        drop: DropReason | None,
        num_reactions: int | None = None,
    ) -> bool:
        """judging -> scoring, ready (a reward and no hint), or dropped(drop).

        False, and nothing written, if the claim is lost, or if the turn has more than the
        `num_reactions` that were judged: then it is judged again. Raises ValueError for a verdict
        without a hint, a reward and a drop reason.
        """
        if drop is None and not verdict.hint and verdict.reward is None:
            raise ValueError(f"turn {verdict.turn_id}: no hint and no drop reason")
        judged = claims.JudgedTurn(
            owner=owner,
            verdict=verdict,
            drop=drop,
            now=self._clock(),
            num_reactions=num_reactions,
        )
        return await self.writer.run_bulk(claims.verdict_op, judged, "verdict")

    async def commit_score(
        self, owner: str, score: Score, candidates: tuple[str, ...] | None = None
    ) -> bool:
        """As `commit_scores`, of a turn with one candidate."""
        return await self.commit_scores(owner, [score], candidates)

    async def commit_scores(
        self,
        owner: str,
        wanted: Sequence[Score],
        candidates: tuple[str, ...] | None = None,
        policy: PolicyScore | None = None,
    ) -> bool:
        """scoring -> ready, or dropped(held_out), with the scores of all candidates of one turn, by
        one teacher, and what the `policy` says of it: turns of recordings need that.

        False, and nothing is written, if the claim is lost, or if the turn's hints are no longer
        `candidates`. Raises ValueError unless each score has one finite log-prob per response id,
        or is UNSCORED.
        """
        of = [*wanted, policy] if policy is not None else list(wanted)
        if len({one.turn_id for one in of}) != 1:
            raise ValueError("a turn is scored under at least one candidate, and alone")
        turn_id, now = of[0].turn_id, self._clock()
        try:
            prompt_ids, response_ids = await self.turn_tokens(turn_id)
        except UnknownTurn:  # deleted while it was scored
            return False
        rows = scores.score_rows(wanted, prompt_ids, response_ids, now)
        scored = claims.ScoredTurn(
            owner=owner,
            turn_id=turn_id,
            rows=rows,
            now=now,
            candidates=candidates,
            policy=scores.checked_policy(policy, response_ids),
        )
        return await self.writer.run_bulk(claims.score_op, scored, "score")

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """A claimed or leased turn -> dropped(reason). False if it is not the owner's."""
        return await self._write(
            claims.drop_op,
            owner=owner,
            turn_id=turn_id,
            reason=reason,
            detail=detail,
            now=self._clock(),
        )

    async def save_side_samples(self, turn_id: str, samples: SideSamples) -> None:
        """Keep side samples of a turn, in place of earlier ones, whatever state it is in.

        Raises UnknownTurn, and ValueError unless they stand at each of its response tokens.
        """
        await self._write(side_samples.save_op, turn_id=turn_id, samples=samples, now=self._clock())

    # The trainer

    async def lease(
        self, *, owner: str, count: int, ttl_s: float, whole_sessions: bool = False
    ) -> list[ReadySample]:
        """The `count` oldest ready turns -> leased, or [] if there are fewer.

        With `whole_sessions` all other ready turns of their sessions are leased with them.
        """
        if count < 1:
            raise ValueError(f"a lease asks for at least one turn, got {count}")
        if not await self._read(training.enough_ready, count=count, now=self._clock()):
            return []
        turn_ids = await self._write(
            training.lease_op,
            owner=owner,
            count=count,
            now=self._clock(),
            ttl_s=ttl_s,
            whole_sessions=whole_sessions,
        )
        return await self._read(ready_samples.load_samples, turn_ids=turn_ids)

    async def expire_stale(self, *, oldest_allowed: int) -> int:
        """Ready turns with tokens of a version before `oldest_allowed` -> dropped(stale)."""
        return await self._write(
            training.expire_op, oldest_allowed=oldest_allowed, now=self._clock()
        )

    async def extend_leases(self, owner: str, ttl_s: float) -> int:
        """Hold all leases of `owner` for another `ttl_s` from now; returns how many these are."""
        until = self._clock() + ttl_s
        return await self._write(training.extend_leases_op, owner=owner, until=until)

    async def release_leases(self, owner: str) -> int:
        """All leases of `owner` -> ready; returns how many these were."""
        return await self._write(training.release_op, owner=owner, now=self._clock())

    async def commit_step(self, *, version: PolicyVersion, results: list[SampleResult]) -> None:
        """Insert the policy version and its samples; leased -> trained. One transaction.

        Raises StoreConflict if the version number is taken or a turn is not leased.
        """
        await self._write(
            training.commit_step_op, version=version, results=results, now=self._clock()
        )

    async def commit_handed_over(
        self, *, owner: str, version: PolicyVersion, turn_ids: Sequence[str]
    ) -> None:
        """A step that another process took on the leases of `owner`: leased -> trained.

        What training made of each turn is not kept. One transaction; the same step again changes
        nothing. Raises StoreConflict if the version number is taken or a turn is not leased by
        `owner`.
        """
        await self._write(
            training.commit_handed_over_op,
            version=version,
            turn_ids=turn_ids,
            owner=owner,
            now=self._clock(),
        )

    async def reconcile(self, chain: Chain) -> ReconcileReport:
        """Make versions and trained turns equal to the surviving manifests, oldest first.

        Raises StoreConflict if the chain trained a turn twice or contradicts a stored manifest.
        """
        return await self._write(reconcile.reconcile_op, chain=chain, now=self._clock())

    async def next_version(self) -> int:
        """A version number that was never used."""
        return await self._read(training.next_version)

    async def highest_version(self) -> int:
        """The highest version number that a step or a sampled token has; 0 if there is none."""
        return await self._read(training.highest_version)

    async def latest_version(self) -> PolicyVersion | None:
        """The newest version that is not abandoned."""
        return await self._read(training.latest_version)

    async def ready_count(self) -> int:
        """Number of turns that wait for a trainer."""
        return await self._read(summary.ready_count)

    # Inspection

    async def counts(self) -> dict[TurnState, int]:
        """Number of turns in each state."""
        return await self._read(summary.counts)

    async def drops(self) -> dict[DropReason, int]:
        """Number of dropped turns by reason."""
        return await self._read(summary.drops)

    async def turn(self, turn_id: str) -> TurnRecord | None:
        """A turn by id."""
        try:
            return (await self.turns([turn_id]))[0]
        except UnknownTurn:
            return None

    async def has_turn(self, turn_id: str) -> bool:
        """Whether a turn is stored."""
        return await self._read(turns.token_count, turn_id=turn_id) is not None

    async def turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        """Turns by id, in this order. Raises UnknownTurn."""
        return await self._read(loading.load_turns, turn_ids=turn_ids)

    async def votes_of(self, turn_id: str) -> tuple[Vote, ...]:
        """The votes on a turn."""
        return await self._read(summary.votes_of, turn_id=turn_id)

    async def verdict_of(self, turn_id: str) -> Verdict | None:
        """The verdict on a turn."""
        return await self._read(summary.verdict_of, turn_id=turn_id)

    async def sessions_named(self, session: str) -> list[SessionFacts]:
        """What is known of the sessions of this id or client's name, turn by turn."""
        return await self._read(diagnosis.sessions_named, session=session)

    async def run_facts(self) -> RunFacts:
        """The numbers of turns of the run, by state and drop reason."""
        return await self._read(diagnosis.run_facts)

    async def feedback_of(self, turn_id: str) -> list[KeptFeedback]:
        """The feedback on a turn, oldest first."""
        return await self._read(feedback.kept_on, turn_ids=[turn_id])

    async def score_of(self, turn_id: str) -> Score | None:
        """The newest score of a turn."""
        found = await self._read(scores.load_scores, turn_ids=[turn_id])
        return found.get(turn_id)

    async def vote_summary(self) -> VoteSummary:
        """Sums over all votes and verdicts."""
        return await self._read(summary.vote_summary)

    async def sampled_from_abandoned(self) -> list[str]:
        """Turns with tokens of an abandoned policy version."""
        return await self._read(summary.sampled_from_abandoned)

    async def mean_score_latency(self) -> float | None:
        """Mean seconds of the teacher's calls that gave a score; None without any."""
        return await self._read(summary.mean_score_latency)

    async def list_turns(
        self, session_id: str | None = None, state: TurnState | None = None, limit: int = 100
    ) -> list[TurnRef]:
        """The newest turns, newest first."""
        return await self._read(linking.list_turns, session_id=session_id, state=state, limit=limit)

    async def example_turns(self, limit: int) -> list[ExampleTurn]:
        """The newest trained turns with verdict, score and sample."""
        return await self._read(summary.example_turns, limit=limit)

    async def hinted_turn_ids(self) -> list[str]:
        """The turns of main conversations that earned a hint, oldest first."""
        return await self._read(summary.hinted_turn_ids)
