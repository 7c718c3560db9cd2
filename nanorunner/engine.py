"""The engine: requests in, updates out, with up to `depth` steps in flight.

    add_request(s), add_embedding -> Intake -> scheduler.add
    step        -> scheduler.schedule -> call("step", wire) -> StepHandle   (until `depth` fly)
                   oldest StepHandle.result() -> scheduler.update -> [RequestUpdate]

An update brings a request's newest ids (one a step, more with speculation), unless the request is
quiet: then all come with its last update, and a step of quiet requests alone makes nothing per
request on the host.

Token ids only; text is the caller's. Not for use by several threads at once. When a step fails
the engine is broken: that call and every later one raise the same error, and only close() is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from nanorunner.intake import Checked, Intake
from nanorunner.interrupt import DeferInterrupt
from nanorunner.request import RequestUpdate
from nanorunner.sampling_params import SamplingParams
from nanorunner.scheduler import Scheduler
from nanorunner.scheduler_stats import SchedulerStats
from nanorunner.workers.messages import StepHandle, StepOutput
from nanorunner.workers.spans import (
    NO_STEP,
    SCHEDULE,
    UPDATE,
    WAIT,
    RankSpans,
    SpanRecorder,
    clock_problem,
)

if TYPE_CHECKING:  # it imports torch, which the scheduler's side does without
    from nanorunner.workers.rank_counters import RankCounters


class Engine:
    """Runs requests to their end.

    call(method, *args) runs a method on every rank and returns rank 0's value: a StepHandle for
    "step". result(handle) waits for its output. close() stops the ranks. seed is what requests
    without a seed draw theirs from.
    defer_interrupt is the one that `call` uses, so that a second Ctrl-C gets through both. runner:
    which one the ranks have, so that what it lacks is refused. counters() and spans() ask every
    rank. recorder: rank 0's, None when no spans are recorded.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        call: Callable[..., Any],
        *,
        vocab_size: int,
        seed: int = 0,
        close: Callable[[], None] = lambda: None,
        result: Callable[[StepHandle], StepOutput] = lambda handle: handle.result(),
        defer_interrupt: DeferInterrupt | None = None,
        runner: str = "v2",
        counters: Callable[[], list[RankCounters]] = list,
        spans: Callable[[], list[RankSpans]] = list,
        recorder: SpanRecorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._call = call
        self._close = close
        self._result = result
        self._counters = counters
        self._spans = spans
        self._recorder = recorder
        self._defer_interrupt = defer_interrupt or DeferInterrupt()
        self._intake = Intake(scheduler, vocab_size, seed, runner)
        self._in_flight: deque[StepHandle] = deque()
        self._stream_updates: dict[int, deque[RequestUpdate]] = {}  # of open streams, by request
        self._other_updates: list[RequestUpdate] = []  # came while a stream was stepping
        self._error: BaseException | None = None  # set once: the engine is broken or closed
        self._is_closed = False

    @property
    def stats(self) -> SchedulerStats:
        """What was scheduled so far."""
        return self.scheduler.stats

    def counters(self) -> list[RankCounters]:
        """Return what each rank has counted since its start, by rank; for between two steps."""
        self._check_usable()
        return self._counters()

    def spans(self) -> list[RankSpans]:
        """Return where each rank's time has gone since its start, by rank; for between two steps.

        Raises ValueError when the engine records no spans.
        """
        self._check_usable()
        if self._recorder is None:
            raise ValueError("this engine records no spans; start it with step_times or trace")
        asked_ns = self._recorder.now()
        spans = self._spans()
        if problem := clock_problem(asked_ns, spans, self._recorder.now()):
            raise RuntimeError(problem)
        return spans

    def check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> Checked:
        """Return what add_checked takes, with nothing queued; ValueError as in add_request."""
        return self._intake.check(prompt_ids, params)

    def add_request(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, quiet: bool = False
    ) -> int:
        """Queue a request and return its id; ValueError, with nothing queued, if it cannot run.

        quiet: one update at its end, with all ids, is enough. One that asks for log-probabilities,
        which come with each id, is never quiet.
        """
        if params.n > 1:
            raise ValueError(f"n {params.n}: here it must be 1; add_requests() takes more")
        return self.add_requests(prompt_ids, params, quiet=quiet)[0]

    def add_requests(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, quiet: bool = False
    ) -> list[int]:
        """Queue params.n requests for one prompt and return their ids; errors as in add_request.

        They share the prompt's full KV blocks by the prefix cache. The first alone brings the
        prompt's log-probabilities.
        """
        self._check_usable()
        return self._queue(self.check_request(prompt_ids, params), quiet)

    def check_embedding(self, prompt_ids: Sequence[int], pooling: str) -> Checked:
        """Return what add_checked takes, with nothing queued; ValueError as in add_embedding."""
        return self._intake.check_embedding(prompt_ids, pooling)

    def add_embedding(self, prompt_ids: Sequence[int], pooling: str) -> int:
        """Queue an embedding of a prompt by the last hidden state or by the "mean" of all.

        Return its id. Its only update has the embedding in `extras`. Errors as in add_request.
        """
        self._check_usable()
        return self._queue(self.check_embedding(prompt_ids, pooling), quiet=False)[0]

    def add_checked(self, checked: Checked, *, quiet: bool = False) -> list[int]:
        """Queue the requests of what this engine has checked and return their ids.

        Raises ValueError, with nothing queued, for what another engine has checked.
        """
        self._check_usable()
        return self._queue(checked, quiet)

    def _queue(self, checked: Checked, quiet: bool) -> list[int]:
        requests = self._intake.requests(checked)
        for request in requests:
            request.is_quiet = quiet and not request.brings_extras
            self.scheduler.add(request)
        return [request.request_id for request in requests]

    def stepping(self) -> AbstractContextManager[None]:
        """Return a block for a loop of steps: it spares each of them the care for Ctrl-C anew."""
        return self._defer_interrupt.standing()

    def has_unfinished(self) -> bool:
        """Whether step() has anything left to run, to read or to report."""
        return bool(self.scheduler.roster.requests or self._in_flight or self._other_updates)

    def step(self) -> list[RequestUpdate]:
        """Fill the queue of steps, wait for the oldest and return what it brought.

        The list may be empty. Ctrl-C waits for the end of the step, aborts every request and
        raises KeyboardInterrupt with the engine usable; a second one breaks the engine.
        """
        updates, self._other_updates = self._other_updates, []
        brought = self._step()
        if not self._stream_updates:
            return updates + brought
        for update in brought:
            stream = self._stream_updates.get(update.request_id)
            if stream is None:
                updates.append(update)
            else:
                stream.append(update)
        return updates

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[RequestUpdate]:
        """Queue a request and yield its updates; leaving the iterator early aborts it.

        Other requests go on meanwhile; their updates are kept for their own stream or step().
        """
        request_id = self.add_request(prompt_ids, params)
        self._stream_updates[request_id] = deque()
        return self._stream(request_id)

    def _stream(self, request_id: int) -> Iterator[RequestUpdate]:
        updates = self._stream_updates[request_id]
        try:
            while True:
                while not updates:
                    self._other_updates = self.step()
                update = updates.popleft()
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            del self._stream_updates[request_id]
            self.abort(request_id)

    def abort(self, request_id: int) -> bool:
        """End a request now; False if it has ended already. The ranks hear of it in the next step.

        Only a stream reports it, with the reason "abort": everyone else knows.
        """
        return self._end(request_id, "abort")

    def abort_all(self) -> None:
        """End every request that waits or runs."""
        for request_id in self.scheduler.request_ids():
            self.abort(request_id)
        self._other_updates = []

    def finish(self, request_id: int, num_output_tokens: int, reason: str) -> bool:
        """End a request whose caller found its end, say a stop string; False if it has ended.

        The caller keeps num_output_tokens ids and gives `reason` as the finish reason; no update
        follows, but in a stream.
        """
        request = self.scheduler.roster.requests.get(request_id)
        if request is not None:
            known = self.scheduler.num_output_tokens(request)
            assert 0 <= num_output_tokens <= known, f"{num_output_tokens} of {known} ids kept"
        return self._end(request_id, reason)

    def close(self) -> None:
        """Stop the ranks; a second call does nothing. Requests that were left have no end."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._error is None:
            self._error = RuntimeError("this engine is closed; make a new one")
        self._in_flight.clear()
        self._close()

    def _end(self, request_id: int, reason: str) -> bool:
        # A step that broke half-way may have left the books so that nothing can be taken out.
        if self._error is not None or not self.scheduler.end(request_id):
            return False
        if request_id in self._stream_updates:
            self._stream_updates[request_id].append(RequestUpdate(request_id, [], reason))
        return True

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error

    def _step(self) -> list[RequestUpdate]:
        self._check_usable()
        try:
            # The first Ctrl-C is raised where this block ends, with the books in order.
            with self._defer_interrupt:
                try:
                    updates = self._advance()
                except BaseException as error:
                    self._break(error)
                    raise
        except KeyboardInterrupt:
            self.abort_all()
            raise
        return updates

    def _advance(self) -> list[RequestUpdate]:
        scheduler, recorder = self.scheduler, self._recorder
        if recorder is not None:
            recorder.begin_round()
        while len(self._in_flight) < scheduler.depth:
            step = scheduler.schedule()
            if recorder is not None:
                recorder.lap_of(SCHEDULE, NO_STEP if step is None else step.step_input.step_id)
            if step is None:
                break
            try:
                handle = self._call("step", step.step_input.to_wire())
            except BaseException:
                # Nobody may hit a prefix that was never written.
                scheduler.withdraw(step)
                raise
            self._in_flight.append(handle)
        updates = scheduler.take_failed()
        if self._in_flight:
            output = self._result(self._in_flight.popleft())
            if recorder is not None:
                recorder.lap_of(WAIT, output.step_id)
            updates += scheduler.update(output)
            if recorder is not None:
                recorder.lap_of(UPDATE, output.step_id)
                if not (self._in_flight or scheduler.roster.requests):
                    recorder.rest()
        elif not updates and scheduler.roster.requests:
            raise RuntimeError(
                f"the scheduler is stuck: {scheduler.num_waiting} requests wait, "
                f"{scheduler.num_running} run, and no step can be made"
            )
        return updates

    def _break(self, error: BaseException) -> None:
        """Remember why this engine can do no further step."""
        self._in_flight.clear()
        if isinstance(error, Exception):
            self._error = error
        else:
            self._error = RuntimeError(
                f"a step was stopped half-way ({type(error).__name__}); make a new engine"
            )
