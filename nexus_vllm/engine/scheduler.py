"""The scheduler's half: when each sequence is shrunk and which pages it gives back.

Two classes, because vLLM's asynchronous scheduler is a subclass of its synchronous one; which of
them serves is vLLM's decision (`compat.check_config`).
"""

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from nexus_vllm import policies
from nexus_vllm.admission import carried_pages, evicts, largest_plan, most_pages, plans
from nexus_vllm.config import Budget, Directive, DirectiveError
from nexus_vllm.engine import compat
from nexus_vllm.engine.manager import EvictionManager, Hold
from nexus_vllm.engine.replays import Replays
from nexus_vllm.engine.requests import scores_prompt
from nexus_vllm.engine.stats import STATS_KEY
from nexus_vllm.plan import Eviction, EvictionPlan, StepPlan, StepReport
from nexus_vllm.policies import ReplayPolicy
from nexus_vllm.replay import longest_replay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.tokenizers import TokenizerLike
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM shows INFO of its own loggers only


@dataclass
class Ledger:
    """One request: what it asked for and what its evictions did. No `hold`: never evicted."""

    directive: Directive
    hold: Hold | None
    budget_blocks: int | None
    prompt_tokens: int
    plans: list[EvictionPlan]
    first_computed: int | None = None  # tokens before were not computed but found in the cache
    event: int = 0
    eviction_steps: int = 0
    evicted_blocks: int = 0
    moved_blocks: int = 0
    peak_blocks: int = 0
    replay_tokens: int | None = None
    error: str | None = None

    def record(self, request_id: str, final_blocks: int, block_size: int) -> dict[str, Any]:
        """What the user is told, in the reply and at /kv_eviction/requests/{id}."""
        budget = self.budget_blocks
        plan = self.hold.plan if self.hold else self.plans[0] if self.plans else None
        told = {
            "request_id": request_id,
            "policy": self.directive.policy,
            "allocator": self.directive.allocator,
            "prefill": "streaming" if plan and plan.streaming else "oneshot",
            "budget_tokens": None if budget is None else budget * block_size,
            "prompt_tokens": self.prompt_tokens,
            "eviction_steps": self.eviction_steps,
            "evicted_blocks": self.evicted_blocks,
            "moved_blocks": self.moved_blocks,
            "peak_blocks": max(self.peak_blocks, final_blocks),
            "final_blocks": final_blocks,
        }
        if self.replay_tokens is not None:
            told["replay_tokens"] = self.replay_tokens
        return told if self.error is None else {**told, "error": self.error}


class EvictionSchedulerMixin(Scheduler):
    """Over either of vLLM's schedulers: plans slides before a step and reports what they did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eviction = compat.settings_of(self.vllm_config)
        self.pages = self._only_manager()
        self.ledgers: dict[str, Ledger] = {}
        self._stopped: list[str] = []
        self._finished_records: list[dict[str, Any]] = []
        self._counts = _zero_counts()
        self._replaying = {
            name: policy
            for name in self.eviction.choices
            if isinstance(policy := policies.served(name, self.eviction), ReplayPolicy)
        }
        self.replays = Replays(self._tokenizer(), self._longest_replay)
        most = most_pages(self.eviction, self.max_model_len, self.num_spec_tokens)
        logger.info(
            "A sequence of %d tokens holds %d KV pages at most; the pool of %d carries %.1f.",
            self.max_model_len,
            most,
            self._usable,
            self._usable / most,
        )
        logger.info(
            "KV eviction is on: policy %s, budget %s (a percentage never below %d tokens), "
            "allocator %s (profile %s), blocks of %d tokens, %s scheduling.",
            self.eviction.policy,
            self.eviction.budget,
            self.eviction.budget_floor,
            self.eviction.directive(None).allocator,
            self.eviction.profile or "none",
            self.eviction.block_size,
            "asynchronous" if isinstance(self, AsyncScheduler) else "synchronous",
        )

    @property
    def _usable(self) -> int:
        """The pool's pages, without vLLM's null page."""
        return int(self.pages.block_pool.num_gpu_blocks) - 1

    @property
    def _carried(self) -> int:
        """Pages that one sequence may fill, which its drafts do not need."""
        size = self.eviction.block_size
        return carried_pages(self._usable, self.num_spec_tokens, size, self.max_model_len)

    @property
    def _longest_replay(self) -> int:
        return longest_replay(self._carried, self.eviction.block_size, self.max_model_len)

    def _tokenizer(self) -> "TokenizerLike | None":
        if self.vllm_config.model_config.skip_tokenizer_init:
            return None
        return self.structured_output_manager.tokenizer

    def _only_manager(self) -> EvictionManager:
        """Proof that our manager holds this model's pages; vLLM would serve unevicted without."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], EvictionManager):
            kinds = (f"{type(m.kv_cache_spec).__name__} in {type(m).__name__}" for m in managers)
            raise compat.UnsupportedError(
                f"the model's KV cache has the groups [{', '.join(kinds)}]",
                f"KV eviction needs exactly one, in {EvictionManager.__name__}",
                "serve this model without --kv-eviction",
            )
        if managers[0].block_size != self.eviction.block_size:
            raise compat.UnsupportedError(
                f"the KV block size is {managers[0].block_size}",
                f"KV eviction is set up for {self.eviction.block_size}",
                f"pass --block-size {self.eviction.block_size}",
            )
        if self.hash_block_size != managers[0].block_size:
            raise compat.UnsupportedError(
                f"prefixes are hashed every {self.hash_block_size} tokens",
                f"blocks of {managers[0].block_size} tokens must be found whole",
                "drop --prefix-match-unit",
            )
        return managers[0]

    # Arrival

    def add_request(self, request: "Request") -> None:
        """Read the request's directive. The front end has already refused malformed ones."""
        if request.request_id not in self.ledgers:
            params = request.sampling_params
            try:
                directive = self.eviction.directive(params.extra_args if params else None)
            except DirectiveError as error:
                # Only a request made by hand gets here; an exception would end the engine.
                logger.error("%s: %s The server's default applies.", request.request_id, error)
                directive = self.eviction.directive(None)
            self._open(request, directive)
        super().add_request(request)
        self._begin_pieces()

    def _open(self, request: "Request", directive: Directive) -> None:
        prompt, end = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        try:
            found = plans(
                directive,
                prompt,
                request.max_tokens,
                self.eviction,
                self._carried,
                scores_prompt(request.sampling_params),
            )
        except DirectiveError as error:  # as above: it must not wait forever
            logger.error("%s: %s The largest budget applies.", request.request_id, error)
            found = [largest_plan(prompt, self.eviction, self._carried)]
        hold = None
        # A sequence that ends before its first eviction costs nothing: no window is recorded.
        if evicts(found, end, request.resumable):
            hold = self.pages.holds[request.request_id] = Hold(found[0])
        budget = directive.budget_blocks(prompt, self.eviction)
        ledger = self.ledgers[request.request_id] = Ledger(directive, hold, budget, prompt, found)
        by_policy: dict[str, int] = self._counts["requests"]
        by_policy[directive.policy] = by_policy.get(directive.policy, 0) + 1
        if policy := self._replaying.get(directive.policy):
            ledger.replay_tokens = 0
            if hold is not None and not request.resumable:
                self.replays.join(request, policy, found[0].next_eviction(0))

    # Replays

    def _begin_pieces(self) -> None:
        """Queue the next piece of every replay that waits for one."""
        for replay in self.replays.due():
            piece = self.replays.begin(replay)
            whole = Directive("none", Budget(), 0, "auto")
            length = piece.num_prompt_tokens
            self.ledgers[piece.request_id] = Ledger(whole, None, None, length, [])
            # Nobody else will ask for the rest of it.
            self.pages.published[piece.request_id] = len(replay.prompt)
            super().add_request(piece)

    def _handle_blocked_waiting_request(self, request: "Request") -> bool:
        """A request waits until its prompt has been replayed."""
        ready = super()._handle_blocked_waiting_request(request)
        return ready and not self.replays.waits(request.request_id)

    def finish_requests(
        self, request_ids: "str | Iterable[str] | None", finished_status: RequestStatus
    ) -> "list[Request]":
        """End requests, and with the last one that needs it a replay that is not done."""
        ours = self.replays.at_work()
        ended = super().finish_requests(request_ids, finished_status)
        super().finish_requests(self.replays.abandoned(), RequestStatus.FINISHED_ABORTED)
        return [request for request in ended if request.request_id not in ours]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """vLLM's word that what was computed so far is out of date: new weights, or it sleeps."""
        self.replays.reset()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    # One step

    def schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        """vLLM's step, preceded by the slides that are due; the plan rides on its output."""
        lazy = self.eviction.trigger == "pressure"
        evictions = self._relieve() if lazy else self._evict_due()
        output = super().schedule(throttle_prefills)
        # Preempted within this very step: its pages may already be somebody else's.
        evictions = [e for e in evictions if e.request_id not in self._stopped]
        for eviction in evictions:
            self._book_eviction(eviction)
        started = self._started(output)
        plan = StepPlan(
            started=[i for i in started if self._never_evicted(i)],
            stopped=self._stopped,
            evictions=evictions,
            pieces=[piece for i in started if (piece := self.replays.piece(i))],
            forgotten=self.replays.forgotten,
        )
        self._stopped, self.replays.forgotten = [], []
        self._counts["replay_tokens"] += self.replays.computed(output.num_scheduled_tokens)
        compat.attach_plan(output, plan)
        for request in self.running:
            ledger = self.ledgers[request.request_id]
            held = self.pages.held_blocks(request.request_id)
            ledger.peak_blocks = max(ledger.peak_blocks, held)
        if self.eviction.check_integrity:
            self.pages.check_integrity()
        return output

    def _started(self, output: "SchedulerOutput") -> list[str]:
        """Requests that are computed from their first token on, or from their prefix hit on."""
        cached = output.scheduled_cached_reqs
        starts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        starts += [
            (request_id, start)
            for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request_id in cached.resumed_req_ids
        ]
        for request_id, start in starts:
            ledger = self.ledgers[request_id]
            if ledger.first_computed is None:  # or else it is a session's next turn
                ledger.first_computed = start
        return [request_id for request_id, _ in starts]

    def _never_evicted(self, request_id: str) -> bool:
        hold = self.ledgers[request_id].hold
        return hold is not None and hold.released == 0

    def _evict_due(self) -> list[Eviction]:
        """Slide every sequence that has reached its next eviction.

        Waiting sessions, too: a turn may end, and its sequence stop running, where one is due.
        """
        evictions = []
        for request in (*self.running, *self.kv_holding_waiting):
            ledger = self.ledgers[request.request_id]
            hold = ledger.hold
            if hold is None:
                continue
            # Tokens in flight count, since workers run steps in order and a fill runs before its
            # step's forward. Drafts never are in flight here (`compat.refusals`).
            computed = request.num_computed_tokens
            if computed < hold.plan.next_eviction(hold.released) or self._has_computed_all(request):
                continue
            if eviction := self._slide(request, ledger, hold):
                evictions.append(eviction)
        return evictions

    def _slide(self, request: "Request", ledger: Ledger, hold: Hold) -> Eviction | None:
        """Shrink a sequence to its budget now; None, counted, where that is impossible."""
        computed = request.num_computed_tokens
        released, target = hold.released, hold.plan.target(computed)
        full = computed // self.pages.block_size
        slide = self.pages.slide(request.request_id, target, full)
        if slide is None:
            self._counts["postponed"] += 1
            return None
        return Eviction(
            request_id=request.request_id,
            policy=ledger.directive.policy,
            allocator=ledger.directive.allocator,
            seed=ledger.directive.seed,
            event=ledger.event,
            computed=computed,
            released=released,
            target=target,
            pages=slide.pages,
            kept_pages=slide.kept_pages,
            tail_pages=slide.tail_pages,
            prompt_tokens=request.num_prompt_tokens,
            replay=self.replays.scores(request.request_id),
        )

    def _relieve(self) -> list[Eviction]:
        """Under the pressure trigger: shrink whoever is furthest over budget, if pages run short.

        Short is more than `high_water` of the pool taken, or less free than this step and the next
        waiting request need; it ends at `low_water` and when both are served.
        """
        pool, usable = self.pages.block_pool, self._usable
        wanted = self._demand()
        if pool.get_num_free_blocks() >= max(wanted, usable * (1 - self.eviction.high_water)):
            return []
        wanted = max(wanted, int(usable * (1 - self.eviction.low_water)))
        over = []
        for request in (*self.running, *self.kv_holding_waiting):
            ledger, computed = self.ledgers[request.request_id], request.num_computed_tokens
            hold, first = ledger.hold, ledger.first_computed
            # The newest queries must have been computed, not found in the prefix cache.
            if hold is None or first is None or computed - first < self._window(ledger):
                continue
            if computed < request.num_prompt_tokens and scores_prompt(request.sampling_params):
                continue
            excess = hold.plan.target(computed) - hold.released
            if excess > 0 and not self._has_computed_all(request):
                over.append((excess, request, ledger, hold))
        over.sort(key=lambda entry: -entry[0])
        evictions = []
        for _, request, ledger, hold in over:
            if pool.get_num_free_blocks() >= wanted:
                break
            if eviction := self._slide(request, ledger, hold):
                evictions.append(eviction)
        return evictions

    def _demand(self) -> int:
        """Pages that this step and the first waiting request may take, at most."""
        size = self.pages.block_size
        pages, tokens = 0, self.max_num_scheduled_tokens
        for request in self.running:
            new = min(tokens, request.num_tokens_with_spec + 1 - request.num_computed_tokens)
            tokens -= new
            held = len(self.pages.req_to_blocks[request.request_id])
            pages += max(0, -(-(request.num_computed_tokens + new) // size) - held)
        if self.waiting:
            request = self.waiting.peek_request()
            hold = self.ledgers[request.request_id].hold
            whole = -(-request.num_tokens // size)
            pages += hold.plan.most_blocks(request.num_tokens) if hold else whole
        return min(pages, self._usable)

    @staticmethod
    def _has_computed_all(request: "Request") -> bool:
        """Whether nothing will attend any more: the last token is sampled, but never computed."""
        last = request.num_prompt_tokens + request.max_tokens - 1
        return not request.resumable and request.num_computed_tokens >= last

    def _book_eviction(self, eviction: Eviction) -> None:
        ledger, freed = self.ledgers[eviction.request_id], eviction.target - eviction.released
        ledger.event += 1
        ledger.eviction_steps += 1
        ledger.evicted_blocks += freed
        self._counts["eviction_steps"] += 1
        self._counts["evicted_blocks"] += freed

    def _reserve_prefill_lookahead(
        self, request: "Request", num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's last word on a chunk's length, and ours: it ends where an eviction is due."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        hold = self.ledgers[request.request_id].hold
        if hold is None or not tokens:  # nothing to schedule stays nothing
            return tokens
        waits = request.status != RequestStatus.RUNNING
        if waits and tokens > request.num_tokens - num_computed_tokens:
            # Its last token, which vLLM pads with drafts that will all be rejected, and insists on.
            return tokens
        if self.eviction.trigger == "pressure":
            return max(1, min(tokens, self._room(request, num_computed_tokens)))
        due = hold.plan.next_eviction(hold.released) - num_computed_tokens
        if due <= 0:
            # Postponed, since others hold its pages and the pool is full. Page by page, so that
            # others are preempted one by one, and not the sequence itself for a whole chunk.
            size = self.pages.block_size
            due = size - num_computed_tokens % size
        return min(tokens, due)

    def _room(self, request: "Request", computed: int) -> int:
        """Tokens that fit in the sequence's own pages and the free ones."""
        held = len(self.pages.req_to_blocks.get(request.request_id, ()))
        free = self.pages.block_pool.get_num_free_blocks()
        return (held + free) * self.pages.block_size - computed

    def _get_local_prefix_cache_hit(
        self, request: "Request"
    ) -> "tuple[KVCacheBlocks, int, int, bool]":
        """Choose between one shot and streaming, and cap hits so that the window before the first
        eviction is computed, not looked up."""
        blocks, hit, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        ledger = self.ledgers[request.request_id]
        hold = ledger.hold
        if piece := self.replays.piece(request.request_id):
            # Whatever is repeated must be computed to be looked at.
            whole = piece.prompt_tokens // self.pages.block_size * self.pages.block_size
            if hit > whole:
                blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, whole)
            return blocks, min(hit, whole), boundary, diverged
        if hold is None:
            return blocks, hit, boundary, diverged
        self._choose_plan(request, hold, sum(b.ref_cnt > 0 for b in blocks.blocks[0]))
        size = self.pages.block_size
        most = max(0, hold.plan.next_eviction(0) - self._window(ledger)) // size * size
        lazy = self.eviction.trigger == "pressure" and request.num_tokens < self._usable * size
        if hit > most and not lazy:
            blocks, hit = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        return blocks, hit, boundary, diverged

    def _window(self, ledger: Ledger) -> int:
        """Query rows that score this request's blocks."""
        return self.eviction.of(ledger.directive.policy).window

    def _choose_plan(self, request: "Request", hold: Hold, shared: int) -> None:
        """Where the server may choose: the first plan that fits in what is free now.

        `shared`: pages of the prompt that others hold already. A preempted request keeps its plan.
        """
        found = self.ledgers[request.request_id].plans
        if len(found) < 2 or request.num_preemptions:
            return
        room = self.pages.block_pool.get_num_free_blocks() + shared
        fitting = [plan for plan in found if plan.most_blocks(request.num_tokens) <= room]
        hold.plan = (fitting or found)[0]

    def _preempt_request(
        self, request: "Request", timestamp: float, drop_stale_output: bool = False
    ) -> None:
        """A preempted sequence starts over: it will meet the same evictions again."""
        self.pages.withdraw(request.request_id, request.num_computed_tokens)
        super()._preempt_request(request, timestamp, drop_stale_output)
        ledger = self.ledgers[request.request_id]
        ledger.event, ledger.first_computed = 0, None
        self._stopped.append(request.request_id)

    def _update_request_as_session(self, session: "Request", update: Any) -> None:
        """A streaming-input session goes on with a longer prompt and what it still holds.

        vLLM drops the last token of a turn. 0.31 keeps the hash of a page that this token had
        completed, and publishes all later ones of the session under wrong hashes. Remove with it.
        """
        del session.block_hashes[session.num_computed_tokens // self.hash_block_size :]
        super()._update_request_as_session(session, update)
        ledger = self.ledgers[session.request_id]
        ledger.prompt_tokens = session.num_prompt_tokens
        if ledger.hold is not None:
            plan, start = ledger.hold.plan, session.num_computed_tokens
            turn = -(-(session.num_prompt_tokens - start) // plan.block_size)
            fits = plan.budget + turn + 1 <= self._carried
            if ledger.first_computed is not None:
                # The newest queries must have been computed, not found in the prefix cache.
                start = max(start, ledger.first_computed + self._window(ledger))
            ledger.hold.plan = replace(
                plan,
                prompt_tokens=session.num_prompt_tokens,
                turn_start=start,
                streaming=plan.streaming or not fits,
            )

    # Results

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> Any:
        """Book the worker's report before vLLM finishes requests with it."""
        report = compat.report_of(model_runner_output)
        failed: list[tuple[Request, str]] = []
        if report is not None:
            self._book(report)
            failed = self._fail(report.failed)
        ours = self.replays.at_work()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for told in outputs.values() if ours else ():
            told.outputs = [one for one in told.outputs if one.request_id not in ours]
        self._begin_pieces()
        for request, why in failed:
            # As vLLM tells of requests whose grammar does not compile; `requests` reads the reason.
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=why,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs

    def _fail(self, errors: dict[str, str]) -> "list[tuple[Request, str]]":
        """End requests whose policy has failed, before a token of that step counts as theirs.

        Returns those that had not ended before, with what their client is told.
        """
        told = {}
        for request_id, error in errors.items():
            with contextlib.suppress(KeyError):  # as in `_book`
                ledger = self.ledgers[request_id]
                ledger.error, told[request_id] = error, _failure(ledger.directive, error)
        ended = self.finish_requests(errors, RequestStatus.FINISHED_ERROR)
        return [(request, told[request.request_id]) for request in ended]

    def _book(self, report: StepReport) -> None:
        for request_id, moved in report.moved.items():
            self._counts["moved_blocks"] += int(moved)
            with contextlib.suppress(KeyError):  # aborted while its step was in flight
                self.ledgers[request_id].moved_blocks += int(moved)
        self._counts["seconds"] += report.seconds

    def _free_request(
        self, request: "Request", delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Close the ledger and send its record with the reply.

        A reply that ended by a stop string is out by then, since vLLM's front end looks for those
        and aborts the request here: its record is found at /kv_eviction/requests/{id} only.
        """
        request_id = request.request_id
        ledger = self.ledgers.pop(request_id)
        if self.replays.piece(request_id):
            self.replays.end(request)
            self.pages.published.pop(request_id)
            self._stopped.append(request_id)
            return super()._free_request(request, delay_free_blocks)
        if ledger.replay_tokens is not None:
            ledger.replay_tokens = self.replays.leave(request_id)
        held = self.pages.held_blocks(request_id)
        record = ledger.record(request_id, held, self.pages.block_size)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        self.pages.holds.pop(request_id, None)
        self._stopped.append(request_id)
        self._finished_records.append(record)
        told = {key: value for key, value in record.items() if key != "request_id"}
        return {**(kv_params or {}), "kv_eviction": told}, ec_params

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        """Send our counts with vLLM's own (read by `server.metrics`), as changes since the last."""
        stats = super().make_stats(*args, **kwargs)
        counts, self._counts = self._counts, _zero_counts()
        records, self._finished_records = self._finished_records, []
        if stats is None:  # --disable-log-stats: nobody is listening
            return None
        held = sum(self.pages.held_blocks(request_id) for request_id in self.ledgers)
        payload = {**counts, "live_blocks": held, "finished": records}
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), STATS_KEY: payload}
        return stats


def _failure(directive: Directive, error: str) -> str:
    """What a client is told whose policy has raised; `error` is cut, the log has it whole."""
    return (
        f"KV eviction ended this request: policy {directive.policy!r} with allocator "
        f"{directive.allocator!r} could not choose what stays ({error[:200]}). Use another policy "
        "or allocator, or the budget full."
    )


def _zero_counts() -> dict[str, Any]:
    return {
        "eviction_steps": 0,
        "evicted_blocks": 0,
        "moved_blocks": 0,
        "postponed": 0,
        "replay_tokens": 0,
        "seconds": [],
        "requests": {},
    }


class EvictionScheduler(EvictionSchedulerMixin, Scheduler):
    """vLLM's synchronous scheduler with eviction."""


class AsyncEvictionScheduler(EvictionSchedulerMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with eviction."""
