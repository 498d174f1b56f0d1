"""The decode loop: admits requests while others decode.

One thread runs `Scheduler.run`. Everything reaches it through `call` (a queue) and leaves through
`notify`, once a step. Each turn of the loop: carry out calls, prefill what waits, score what waits,
one decode step for all running requests. A turn computes only a piece of a long prompt or of a long
sequence to be scored, so that it does not hold up the others. Background work comes after what
agents wait for (`lines`). Running requests occupy rows 0..n-1 of the cache; a new one takes the
next row, and when one ends the last row moves into its place. Prefill stops before the last token:
that one goes through the decode step, so there is one place where tokens are sampled.

It knows no HTTP; tensors are left to the rows and the sampler.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from rollout_bridge.embedded.config import spare_rows
from rollout_bridge.embedded.model.adapters import RowPlan
from rollout_bridge.embedded.model.prefix_cache import Match
from rollout_bridge.embedded.model.rows import LongRequest, Rows
from rollout_bridge.embedded.model.sampling import Sampler
from rollout_bridge.embedded.scheduling.admission import (
    next_long,
    take_prefill_group,
    take_score_group,
)
from rollout_bridge.embedded.scheduling.lines import CONTENDED_PIECE, BackgroundTime, Line
from rollout_bridge.embedded.scheduling.request import EngineRequest, Finish
from rollout_bridge.embedded.server.text import StopStrings
from rollout_bridge.engine.types import AGENT_PRIORITY


class Scheduler:
    """Waiting and running requests of one model."""

    def __init__(
        self,
        *,
        rows: Rows,
        sampler: Sampler,
        tokenizer: Any,
        version: str,
        max_batch: int,
        max_prefill_tokens: int,
        max_step_cost: int,
        notify: Callable[[list[EngineRequest]], None],
    ):
        self.version = version
        self.paused = False
        self.running: list[EngineRequest] = []
        self.to_score: deque[EngineRequest] = deque()
        self._rows = rows
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._max_step_cost = max_step_cost
        self._live, self._background, self._spare = Line(), Line(), Line()
        self._background_time = BackgroundTime()
        self._long_score: LongRequest | None = None
        self._notify = notify
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._stop_strings: dict[EngineRequest, StopStrings] = {}
        self._changed: list[EngineRequest] = []
        self._rows_changed = True
        self._tokens_B1 = self._positions_B1 = torch.empty(0)
        self._longest = 0
        self._plan = RowPlan()

    @property
    def not_running(self) -> list[EngineRequest]:
        """Requests that have yet to be run or scored."""
        begun = [] if self._long_score is None else [self._long_score.request]
        waiting = (request for line in self._lines for request in line.requests)
        return [*waiting, *begun, *self.to_score]

    @property
    def _lines(self) -> tuple[Line, Line, Line]:
        return self._live, self._background, self._spare

    @property
    def _is_contended(self) -> bool:
        """Whether an agent waits for anything."""
        running = any(not request.is_background for request in self.running)
        return running or bool(self._live.requests)

    def _line(self, request: EngineRequest) -> Line:
        if request.is_spare:
            return self._spare
        return self._background if request.is_background else self._live

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` on the scheduler's thread, between two steps (from any thread)."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future

    def stop(self) -> None:
        """Let `run` return after the calls made before (from any thread)."""
        self._calls.put(None)

    @torch.inference_mode()
    def run(self) -> None:
        """Serve until `stop`."""
        while self._carry_out_calls():
            begun = time.perf_counter()
            self._start_waiting(self._live, self._max_step_cost, self._max_batch)
            background_s = self._work_in_background()
            self._decode()
            live_s = time.perf_counter() - begun - background_s
            self._background_time.took(live_s=live_s, background_s=background_s)
            if self._changed:
                self._notify(self._changed)
                self._changed = []

    def refuse_calls(self, error: Exception) -> None:
        """Let the callers know that `run` is over (after it raised)."""
        with suppress(queue.Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(error)

    # Calls: only on the scheduler's thread.

    def submit(self, request: EngineRequest) -> None:
        """Queue a request."""
        if request.score_from is not None:
            self.to_score.append(request)
        elif request.sampling.max_new_tokens == 0:
            self._finish(request, Finish(kind="length"))
        else:
            self._line(request).add(request)

    def abort(self, rid: str | None) -> None:
        """End one request (with those of its batch), or all if None; unknown ids are ignored."""
        for request in [*self.running, *self.not_running]:
            if rid is None or request.rid == rid or request.rid.startswith(f"{rid}_"):
                self._finish(request, Finish(kind="abort", message="Aborted"))

    def pause(self, mode: str) -> None:
        """Stop computing. abort: end all; retract: running ones start over from their tokens."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract_from(0)
            self._put_long_back()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def exchange_weights(self, load: Callable[[], None], version: str | None, keep: bool) -> int:
        """Run `load`; returns how many requests were running.

        Prefixes of older weights are forgotten. With `keep`, running requests keep their keys and
        values (now of mixed versions); otherwise these are computed again.
        """
        load()
        affected = len(self.running)
        self._rows.forget()
        self._put_long_back()
        if keep and self.paused:
            for request in self.running:
                request.kv_is_current = False
        else:
            self._retract_from(0)
        self.version = version if version is not None else self.version
        return affected

    def flush(self) -> None:
        """Forget cached prefixes."""
        self._rows.forget()

    # The loop's parts.

    def _carry_out_calls(self) -> bool:
        """Everything in the queue; waits when there is nothing to compute. False: stop."""
        while True:
            idle = self.paused or not (self.running or self.not_running)
            if idle and self._changed:
                self._notify(self._changed)
                self._changed = []
            try:
                item = self._calls.get(block=idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            function, future = item
            # A caller that left (its client closed the connection) still gets its work done.
            awaited = future.set_running_or_notify_cancel()
            try:
                result = function()
            except Exception as error:  # Whatever it is, it belongs to the caller.
                if awaited:
                    future.set_exception(error)
            else:
                if awaited:
                    future.set_result(result)

    def _work_in_background(self) -> float:
        """Start requests that no agent waits for, and score; returns the seconds it took."""
        begun, contended = time.perf_counter(), self._is_contended
        if not self._background_time.may_begin(is_contended=contended):
            return 0.0
        max_cost, max_batch = self._max_step_cost, self._max_batch
        if contended:
            # Leave some rows for the next requests of agents.
            max_cost, max_batch = max_cost // CONTENDED_PIECE, max_batch - max_batch // 4
        self._start_waiting(self._background, max_cost, max_batch)
        self._score_waiting(max_cost)
        if self._spare.requests:
            agents = sum(request.priority == AGENT_PRIORITY for request in self.running)
            rows = spare_rows(agents, self._max_batch)
            self._start_waiting(self._spare, max_cost, min(rows, max_batch))
        return time.perf_counter() - begun

    def _start_waiting(self, line: Line, max_cost: int, max_batch: int) -> None:
        """Prefill requests of a line, in order of arrival, and let them run."""
        if not self._advance_long(line, max_cost, max_batch):
            return
        budget, cost = self._max_prefill_tokens, max_cost
        # A row is reserved for each long prompt.
        max_batch -= sum(one.long is not None for one in self._lines)
        while line.waiting and budget > 0 and cost > 0:
            group = take_prefill_group(
                line.waiting, self.running, self._rows, max_batch, budget, max_cost
            )
            if not group:
                return
            for request, match in group:
                cost -= (request.num_tokens - match.num_tokens) * request.num_tokens
            sequences = [request.sequence[:-1] for request, _ in group]
            matches = [match for _, match in group]
            budget -= self._rows.prefill(len(self.running), sequences, matches)
            for request, match in group:
                self._let_run(request, match)

    def _let_run(self, request: EngineRequest, match: Match) -> None:
        """Let a request run whose prompt is in the row after those of the running ones."""
        if request.score_from is None and not request.output_ids:
            request.cached_tokens = match.num_tokens
        request.kv_is_current = True
        if request.sampling.stop:
            self._stop_strings[request] = StopStrings(self._tokenizer, request)
        self.running.append(request)
        self._rows_changed = True

    def _advance_long(self, line: Line, max_cost: int, max_batch: int) -> bool:
        """Compute a piece of a long prompt, if there is one, and let it run once it is done. False
        if it waits for room, which nothing else may take first.
        """
        if line.long is None:
            found = next_long(line.waiting, self._rows.match, max_cost)
            if found is None:
                return True
            line.long = self._rows.begin_long(*found)
        long = line.long
        if not long.is_done:
            self._rows.advance(long, max_cost)
        if not long.is_done:
            return True
        lengths = [request.expected_length for request in (*self.running, long.request)]
        if len(self.running) >= max_batch or not self._rows.fits(len(lengths), max(lengths)):
            return False
        self._rows.adopt(long, len(self.running))
        line.long = None
        self._let_run(long.request, long.match)
        return True

    def _put_long_back(self) -> None:
        """Discard what was computed of long requests: they start over."""
        for line in self._lines:
            line.put_long_back()
        if self._long_score is not None:
            self._long_score.request.forget_scores()
            self.to_score.appendleft(self._long_score.request)
            self._long_score = None

    def _score_waiting(self, max_cost: int) -> None:
        """Input log-probs of one group of requests, on the rows after the running ones."""
        self._advance_long_score(max_cost)
        group = take_score_group(
            self.to_score,
            len(self.running),
            self._longest,
            self._rows,
            self._max_prefill_tokens,
            max_cost,
        )
        if group:
            self._rows.score(len(self.running), group)
        for request, _ in group:
            self._is_scored(request)

    def _advance_long_score(self, max_cost: int) -> None:
        """Score a piece of a long sequence, if there is one."""
        if self._long_score is None:
            found = next_long(self.to_score, self._rows.match_scored, max_cost)
            if found is None:
                return
            self._long_score = self._rows.begin_long(*found, is_scored=True)
        long = self._long_score
        self._rows.advance(long, max_cost)
        if long.is_done:
            self._long_score = None
            long.request.cached_tokens = long.match.num_tokens
            self._is_scored(long.request)

    def _is_scored(self, request: EngineRequest) -> None:
        """All input log-probs are there: go on to sampling, if any is wanted."""
        if request.sampling.max_new_tokens == 0:
            self._finish(request, Finish(kind="length"))
        else:
            self._line(request).add(request)

    def _decode(self) -> None:
        """One more token for every running request."""
        if self._rows_changed:
            self._use_rows()
        if not self.running:
            return
        while not self._rows.fits(len(self.running), self._longest + 1):
            self._retract_from(len(self.running) - 1)
            self._use_rows()
        logits_BV = self._rows.decode(
            self._tokens_B1, self._positions_B1, self._longest + 1, self._plan
        )
        ids_B, logprobs_B = self._sampler.sample(logits_BV)
        self._tokens_B1 = ids_B[:, None]
        self._positions_B1 += 1
        self._longest += 1
        version = self.version
        ended = []
        tokens = zip(self.running, ids_B.tolist(), logprobs_B.tolist(), strict=True)
        for request, token_id, logprob in tokens:
            request.append(token_id, logprob, version)
            finish = self._ends(request, token_id) or request.grammar_ends(token_id)
            if finish is not None:
                ended.append((request, finish))
            elif request.stream:
                self._changed.append(request)
        for request, finish in ended:
            self._finish(request, finish)

    def _ends(self, request: EngineRequest, token_id: int) -> Finish | None:
        sampling = request.sampling
        if token_id in sampling.stop_token_ids:
            return Finish(kind="stop", matched=token_id)
        if sampling.stop:
            matched = self._stop_strings[request].push(token_id)
            if matched is not None:
                return Finish(kind="stop", matched=matched)
        if len(request.output_ids) >= sampling.max_new_tokens:
            return Finish(kind="length")
        return None

    def _finish(self, request: EngineRequest, finish: Finish) -> None:
        """Take a request out of wherever it is."""
        if request in self.running:
            row = self.running.index(request)
            if request.kv_is_current:
                self._rows.remember(request.sequence[:-1], row, request.prefix_namespace)
            last = len(self.running) - 1
            if row != last:
                moved = self.running[last]
                self._rows.move(last, row, moved.num_tokens)
                self.running[row] = moved
            self.running.pop()
            self._rows_changed = True
        self._line(request).remove(request)
        if request in self.to_score:
            self.to_score.remove(request)
        if self._long_score is not None and self._long_score.request is request:
            self._long_score = None
            request.forget_scores()
        self._stop_strings.pop(request, None)
        request.finish = finish
        self._changed.append(request)

    def _retract_from(self, row: int) -> None:
        """Put the running requests from `row` on back into the queue, ahead of those waiting."""
        for request in reversed(self.running[row:]):
            request.num_retractions += 1
            self._line(request).waiting.appendleft(request)
        del self.running[row:]
        self._rows_changed = True

    def _use_rows(self) -> None:
        """Tensors of the next step for the rows as they are now."""
        device = self._rows.device
        lengths = [request.num_tokens - 1 for request in self.running]
        last = [request.last_token for request in self.running]
        self._tokens_B1 = torch.tensor(last, device=device, dtype=torch.long)[:, None]
        self._positions_B1 = torch.tensor(lengths, device=device, dtype=torch.long)[:, None]
        self._longest = max(lengths, default=0)
        self._plan = self._rows.plan([request.adapter for request in self.running])
        self._sampler.use(list(self.running))
        self._rows_changed = False
