"""One model turn: match the request in the forest, sample, parse, commit. This module knows no protocol and no HTTP.

    prepare   match the history, form the new tokens        pure, in a thread; may refuse (400)
    sample    attempts on the engine, nothing is written    waits for the session's gate
    commit    parse and write, all or nothing               under the session's commit lock

`run` does all three. HTTP (gateway/exchange.py) and callers in this process (session_client.py) both use it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from silva.codec import TurnCodec
from silva.forest import Canonicaliser, Match, MessageAt, Placement, SessionForest, first_difference
from silva.inference import RETRY_DELAYS_S, Engine
from silva.parsers import TurnParser
from silva.turns.engine_client import EngineClient, Generation, derived_seed
from silva.turns.live_session import LiveSession
from silva.turns.options import TurnServiceOptions
from silva.turns.placing import place_turn
from silva.turns.reading import cut_at_stop, read_turn, shortest_prefix, token_logprobs
from silva.turns.refusals import refuse_hopeless, refuse_images
from silva.types import (
    ApiError,
    Clock,
    EngineFault,
    Image,
    JsonObject,
    Media,
    Message,
    RequestError,
    RequestRow,
    SamplingParams,
    StorageFault,
    TokenUsage,
    TransitionRefused,
    TurnOptions,
    TurnReply,
)
from silva.wire import ModelRequest

T = TypeVar("T")
MAX_INLINE_IDS = 1024
NUM_CODEC_THREADS = 4
"""More than one: a step that takes seconds (a slow template, a long history) must not stop other sessions."""
MAX_PATHS = 64


class ImageKeeper(Protocol):
    """Keeps the images of requests until an engine reads them."""

    async def missing(self, images: Sequence[Image]) -> list[str]:
        """The digests of those images that must be kept and are not kept yet."""
        ...

    async def keep(self, images: Mapping[str, bytes]) -> None:
        """Keep these bytes, by their digest. Raises StorageFault."""
        ...

    def media(self, images: Sequence[Image]) -> tuple[Media, ...]:
        """The images as an engine takes them."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTurn:
    """A turn that can be sampled. It keeps nothing of the request's body."""

    options: TurnOptions
    """What the request asks for besides its history."""
    placement: Placement
    """Where the turn goes in the forest, and its new prompt tokens."""
    state: str
    """Key of the matched parent in hex; of the root where the conversation is new."""
    num_prompt: int
    """Tokens of the whole prompt."""
    num_repairs: int
    """Repairs that the match needed."""
    sampling: SamplingParams
    """What the engine gets."""
    paths: tuple[str, ...]
    """Paths in the request of its first new messages, at most MAX_PATHS."""


class TurnWatch(Protocol):
    """Whoever waits for a turn while it is made."""

    @property
    def waiting(self) -> Sequence[RequestRow]:
        """The rows of the requests that get the reply."""
        ...

    def placed(self, turn: PreparedTurn) -> None:
        """The turn was accepted and is sampled next."""
        ...

    async def until_wanted(self) -> None:
        """Returns as soon as somebody waits for the reply."""
        ...


@dataclass(kw_only=True, eq=False)
class TurnService:
    """Consumes canonical requests, produces committed turns; the single writer of every session's forest.

    Tokenising always runs in its own threads, even for small texts: on the event loop, whose CPU caches are full of
    other data, it costs more than the hop between threads. Forests are matched and written on the event loop only.
    """

    engine: Engine
    """Samples the turns."""
    codec: TurnCodec
    """Messages to ids."""
    parser: TurnParser
    """Sampled text to messages."""
    clock: Clock
    """Times waits and replies."""
    options: TurnServiceOptions
    """Sampling, matching and limits."""
    media: ImageKeeper | None = None
    """Keeps images; without it, requests that contain some are refused."""
    retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S
    """Pauses before a faulty attempt is made again: one retry each."""
    resume_aborted: bool = True
    """An aborted attempt continues behind its ids; else it is made again from the prompt."""

    def __post_init__(self) -> None:
        self._canonicaliser = Canonicaliser(self.options.profiles)
        self._client = EngineClient(
            self.engine,
            self.clock,
            timeout_s=self.options.engine_timeout_s,
            retry_delays_s=self.retry_delays_s,
            resume=self.resume_aborted,
        )
        self._longest_token = max(map(len, self.codec.tokenizer.get_vocab()))
        self._pool = ThreadPoolExecutor(NUM_CODEC_THREADS, thread_name_prefix="silva-codec")

    @property
    def counters(self) -> Counter[str]:
        """Counts over all sessions: `match_<kind>`, `repair_<kind>`, `marker_mismatch`, those of the engine client."""
        return self._client.counters

    async def abort_running(self, session_ids: Collection[str] | None = None) -> int:
        """Abort the attempts that run now (of these sessions, or all); their turns go on when their gate is open."""
        return await self._client.abort_running(session_ids)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, live: LiveSession, request: ModelRequest, record: RequestRow, watch: TurnWatch | None = None
    ) -> TurnReply | ApiError:
        """Run one whole turn, from the request to its reply or error. Where there is a reply, `record` is complete.

        Nothing is committed before `watch` wants it (None: the caller waits for the reply).
        """
        try:
            turn = await self.prepare(live, request, record)
            del request  # the body is let go as soon as the turn is placed
            if watch is not None:
                watch.placed(turn)
            generation = await self.sample(live, turn, record)
            if watch is not None:
                await watch.until_wanted()
            reply = await self.commit(live, turn, record, generation)
        except (RequestError, EngineFault, StorageFault) as fault:
            return ApiError.of(fault)
        for waiting in (
            (record,) if watch is None else watch.waiting
        ):  # here, since the session may end before they read
            live.complete(waiting, record)
        return reply

    async def prepare(self, live: LiveSession, request: ModelRequest, record: RequestRow) -> PreparedTurn:
        """Match the request and form its tokens. Raises RequestError: a refused transition, or a full context."""
        session = live.session
        placement, num_prompt = await self._placed(live, request)
        match = placement.match
        await self._keep_images(placement, request)
        sampling = self._sampling(live, request.options, record, num_prompt)
        record.match = match.kind
        record.repairs = list[str](match.repairs)
        if match.kind != "append" and self.options.agentic_codec == "proven":
            record.difference = self._difference(session.forest, match, request.message_at, request.path_of)
        self.counters["marker_mismatch"] += placement.marker_mismatch
        session.first_request.set()
        return PreparedTurn(
            options=request.options,
            placement=placement,
            state=(match.root if match.parent is None else match.parent.key).hex(),
            num_prompt=num_prompt,
            num_repairs=len(record.repairs),
            sampling=sampling,
            paths=tuple(map(request.path_of, range(match.num_matched, match.num_messages)[:MAX_PATHS])),
        )

    async def count_tokens(self, live: LiveSession, request: ModelRequest) -> int:
        """How many tokens the engine would get for this request. Leaves no trace. Raises RequestError as `prepare`."""
        return (await self._placed(live, request))[1]

    async def _placed(self, live: LiveSession, request: ModelRequest) -> tuple[Placement, int]:
        """Where the request's turn would go, and the number of its prompt tokens."""
        match = self._match(live, request)
        placement = await self._off_loop(partial(self._place, match, request))
        # The placement is valid even if other turns were committed meanwhile: nodes are only ever added.
        parent = placement.match.parent
        held = parent.num_tokens if parent else 0
        return placement, held + len(placement.observation_ids) + len(placement.lead_ids)

    def _match(self, live: LiveSession, request: ModelRequest) -> Match:
        if self.options.agentic_codec == "rerender":
            match = live.session.forest.match(request.conversation, request.digests)
            return replace(match, parent=None, num_matched=0)
        lenient = self.options.lenient
        digests, profiles = self.identify(request)
        match = live.session.forest.match(request.conversation, digests, request.message_at, lenient)
        return replace(match, profiles=profiles) if profiles else match

    def identify(self, request: ModelRequest) -> tuple[Sequence[bytes], tuple[str, ...]]:
        """The digests that identify a request's messages, and the profiles that left something out."""
        return self._canonicaliser.identify(request.digests, request.message_at)

    async def sample(self, live: LiveSession, turn: PreparedTurn, record: RequestRow) -> Generation:
        """Sample a prepared turn. Nothing is written. Raises EngineFault when the engine cannot serve it."""
        generation = await self._client.sample(
            live.session,
            request_id=record.request_id,
            prompt_ids=turn.placement.prompt_ids(),
            sampling=turn.sampling,
            media=self.media.media(turn.placement.images()) if self.media is not None else (),
        )
        record.wait_s = generation.wait_s
        return cut_at_stop(self.codec, generation, turn.sampling.stop)

    async def commit(
        self, live: LiveSession, turn: PreparedTurn, record: RequestRow, generation: Generation
    ) -> TurnReply:
        """Parse a sampled turn and write it into the forest, all of it or nothing."""
        result = generation.result
        message, num_reasoning = await self._commit(live, turn, record, generation)
        usage = TokenUsage(
            prompt_tokens=turn.num_prompt,
            completion_tokens=len(result.ids),
            cached_tokens=min(result.cached_tokens, turn.num_prompt),
            reasoning_tokens=num_reasoning,
        )
        record.usage = usage
        record.finish_reason = result.finish_reason
        return TurnReply(
            request_id=record.request_id,
            created_s=self.clock.wall_s(),
            message=message,
            finish=result.finish_reason,
            usage=usage,
            matched_stop=result.matched_stop if isinstance(result.matched_stop, str) else None,
            logprobs=token_logprobs(self.codec, result) if turn.options.logprobs else None,
        )

    async def _commit(
        self, live: LiveSession, turn: PreparedTurn, record: RequestRow, generation: Generation
    ) -> tuple[Message, int]:
        """The message that the client gets, and how many of the sampled ids are reasoning."""
        forest, placement, result = live.session.forest, turn.placement, generation.result
        # Call ids are made of the sibling number. The lock keeps it true until the turn is written.
        async with live.commit_lock:
            sibling = forest.next_sibling(placement.match.request_key)

            def read():
                response, message = read_turn(
                    self.codec,
                    self.parser,
                    placement,
                    result,
                    sibling=sibling,
                    object_calls=turn.options.object_calls,
                )
                end = self.parser.reasoning_end if message.reasoning else None
                return response, message, shortest_prefix(self.codec, result.ids, end) if end else 0

            small = len(result.ids) <= MAX_INLINE_IDS and not placement.continues
            response, message, num_reasoning = read() if small else await self._off_loop(read)
            response = replace(response, request_id=record.request_id, num_aborts=generation.num_aborts)
            # A repair counts once, with the turn that makes the spelling known; a failed turn leaves it to the next.
            repairs = replace(placement.match, aliases=tuple(forest.unknown_spellings(placement.match))).repairs
            self._match_again(forest, turn, record)
            record.node_id = forest.commit(placement, response).node_id
            self.counters.update(f"repair_{kind}" for kind in repairs)
        return message, num_reasoning

    def _match_again(self, forest: SessionForest, turn: PreparedTurn, record: RequestRow) -> None:
        """Match a turn again: other turns may have been committed since it was placed."""
        match, proven = turn.placement.match, self.options.agentic_codec == "proven"
        parent = match.parent or forest.node_of(match.root) if proven else None
        children = parent.children if parent is not None else []
        same = any(child.key == match.request_key for child in children)
        if same or (children and match.kind != "root"):
            record.match = "branch"
        self.counters[f"match_{record.match}"] += 1
        explained = same or record.match == "append" or record.difference is not None
        if not proven or explained or (parent is not None and parent.cut):
            return

        def path_of(index: int) -> str:
            at = index - match.num_matched
            return turn.paths[at] if at < len(turn.paths) else f"messages[{index}]"

        def message_at(index: int) -> Message:
            return turn.placement.messages[index - match.num_matched]

        record.difference = self._difference(forest, replace(match, parent=parent), message_at, path_of)

    def _difference(
        self, forest: SessionForest, match: Match, message_at: MessageAt, path_of: Callable[[int], str]
    ) -> JsonObject | None:
        return first_difference(
            forest,
            match,
            message_at,
            lenient=self.options.lenient,
            path_of=path_of,
            clean_first=lambda message: self._canonicaliser.clean(message)[0],
        )

    def _sampling(self, live: LiveSession, options: TurnOptions, record: RequestRow, num_prompt: int) -> SamplingParams:
        limit = self._context_limit()
        room = limit - num_prompt
        if room < 1:
            raise RequestError(
                f"the context holds {limit} tokens; the messages of this request take {num_prompt}, which leaves no "
                "room for an answer. Shorten the history",
                field="messages",
                code="context_length_exceeded",
            )
        seed = options.seed
        if seed is None:
            session = live.session
            owner = session.seed_key or session.session_id
            # Searched from the end: the list may be long, and the row is near its end.
            number = next(at for at in range(len(session.requests) - 1, -1, -1) if session.requests[at] is record)
            seed = derived_seed(self.options.seed, owner, number)
        base = self.options.sampling(live.session.mode, room=min(room, options.max_tokens or room))
        return replace(
            base,
            stop=tuple(dict.fromkeys((*base.stop, *options.stop))),
            stop_token_ids=tuple(dict.fromkeys((*self.codec.stop_ids, *base.stop_token_ids))),
            seed=seed,
        )

    async def _keep_images(self, placement: Placement, request: ModelRequest) -> None:
        """Put the images of this turn where the engine finds them. Raises StorageFault."""
        if self.media is None:
            return
        missing = await self.media.missing(placement.images())
        # An old message may have an image whose file was removed: then the whole history is read again.
        if any(request.images.data(digest) is None for digest in missing):
            request.messages_between(0, len(request.digests))
        found = ((digest, request.images.data(digest)) for digest in missing)
        await self.media.keep({digest: data for digest, data in found if data is not None})

    def _place(self, match: Match, request: ModelRequest) -> Placement:
        refuse_hopeless(
            request,
            match,
            limit=self._context_limit(),
            longest_token=self._longest_token,
            encode=self.codec.encode_sampled,
        )
        refuse_images(request, match, self.codec, "none" if self.media is None else self.engine.image_support)
        try:
            return place_turn(self.codec, match, request.messages_between)
        except TransitionRefused as refused:
            field = refused.field or ""
            index = field.removeprefix("messages[").partition("]")[0]
            if field.startswith("messages[") and index.isdigit():
                field = request.path_of(int(index))
            raise refused.at(field or None) from refused

    def _context_limit(self) -> int:
        return min(self.options.rollout_max_context_len or self.engine.max_context_len, self.engine.max_context_len)

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
