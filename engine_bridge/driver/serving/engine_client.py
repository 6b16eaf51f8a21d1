"""vLLM's `EngineClient` over the engine thread: what its OpenAI and Anthropic serving classes talk to.

The event loop tokenises and validates (vLLM's renderer and input processor); the engine thread queues, steps and aborts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from msgspec.structs import replace

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.bridge import EngineThread
from engine_bridge.driver.apis.completions import only_prompt
from engine_bridge.driver.apis.tool_calls import ends_of_thought
from engine_bridge.driver.carried import facts_of, tell, tell_guess
from engine_bridge.driver.corrections.bad_words import ban_all_forms, put_aside
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.grammars.admission import check_grammar
from engine_bridge.driver.serving.adapter_versions import AdapterVersions
from engine_bridge.driver.serving.adapter_waits import AdapterWaits
from engine_bridge.driver.serving.answer import Answer
from engine_bridge.driver.serving.call import current_call
from engine_bridge.driver.serving.continuing import Continuing
from engine_bridge.driver.serving.sampler_room import sampler_room_of
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.vllm_api import (
    EngineClient,
    EngineCoreRequest,
    GenerationError,
    LoRARequest,
    RequestOutput,
    RequestOutputCollector,
    SamplingParams,
    extract_prompt_components,
)
from engine_bridge.grammars.checker import GrammarChecker
from engine_bridge.policy.limits.request_limits import RequestLimits, check_sampling
from engine_bridge.policy.limits.sampler_room import check_room
from engine_bridge.predict.custom_predictor import PATIENCE_S
from engine_bridge.predict.hints import setting_hints
from engine_bridge.predict.node_lengths import NodeLengths
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import ASLEEP, EngineUnavailable, InvalidRequest

DEFAULT_LIMITS = RequestLimits()
# vLLM's serving classes turn any error of `add_lora` into a text; here the errors themselves are kept.
ADAPTER_FAILURES: ContextVar[list[Exception] | None] = ContextVar("adapter_failures", default=None)


class BridgeEngineClient(EngineClient):
    """vLLM's client of one engine thread: it validates requests, queues them and streams their outputs.

    Args:
        engine: the `LLMEngine` of the first build. Its renderer and input processor are kept over rebuilds: they hold the tokenizer and the
            configuration, no engine state.
        grammars: decides whether a grammar may be compiled.
        catalog: of the adapters that may be named.
        lengths: what the node knows of answer lengths; None where lengths are not predicted.

    Attributes:
        max_images: the most pictures that the model reads in one prompt, by its settings and its own limit; 0: it reads none.
    """

    def __init__(
        self,
        thread: EngineThread[VllmDriver],
        engine: Any,
        grammars: GrammarChecker,
        streams: Streams,
        catalog: Catalog,
        lengths: NodeLengths | None = None,
        limits: RequestLimits = DEFAULT_LIMITS,
        *,
        has_prompt_logprobs: bool = True,
    ) -> None:
        self._thread = thread
        self._streams = streams
        self._lengths = lengths
        self._grammars = grammars
        self.limits = limits
        self._has_prompt_logprobs = has_prompt_logprobs
        self._sequence = itertools.count()
        self._ends_of_thought: frozenset[int] = frozenset()
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self.continuing = Continuing(engine.renderer, engine.model_config.max_model_len)
        self.renderer = engine.renderer
        self.input_processor = engine.input_processor
        self._tasks = engine.get_supported_tasks()
        self._sampler_room = sampler_room_of(engine.vllm_config)
        processor = engine.renderer.mm_processor
        self.max_images: int = (
            processor.info.allowed_mm_limits.get("image", 0) if processor is not None else 0
        )
        self.versions = AdapterVersions(thread, catalog, engine.engine_core.engine_core.request_block_hasher)
        self._waits = AdapterWaits(streams, self.versions, self.launch)

    # -- called by the node ------------------------------------------------------------------------------------------

    def use_reasoning_parser(self, name: str) -> None:
        """Know how thoughts of the model end: by vLLM's parser of this name, which has been built before; "" for none."""
        self._ends_of_thought = ends_of_thought(name, self.renderer.get_tokenizer())

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        stream: Any,
        *,
        request: EngineRequest,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> tuple[str, EngineCoreRequest]:
        """Validate and register a request for `stream` (anything with `put`), without queueing it yet.

        Every request passes here, so here its KV is tied to the tenant and to the exact weights of its adapter. `options` are vLLM's own.

        Returns:
            Our unique id, and the request for `launch`.

        Raises:
            InvalidRequest: and vLLM's validation errors, at once.
        """
        check_sampling(params, self.limits)
        if params.prompt_logprobs is not None and not self._has_prompt_logprobs:
            # vLLM's engine would fail in the step, which ends all answers.
            raise InvalidRequest(
                "with --kv-sharing-fast-prefill there are no log probabilities of prompts (prompt_logprobs, or echo with logprobs)"
            )
        # Clients choose request ids (X-Request-Id) and repeat them; the engine must never see one twice.
        unique_id = f"{request_id}-{next(self._sequence)}"
        adapter = self.versions.used_by(lora_request)
        with put_aside(params) as bad_words:
            core_request = self.input_processor.process_inputs(
                unique_id,
                prompt,
                params,
                self._tasks,
                lora_request=adapter,
                session_id=request.session_id or None,
                priority=request.priority,
                **options,
            )
        if core_request.sampling_params is not None:
            core_request.sampling_params.bad_words = bad_words  # for `queue`
        tell(core_request, self._as_queued(request, core_request))
        self.versions.tie(core_request, adapter)
        self._streams.register(unique_id, stream)
        return unique_id, core_request

    def _as_queued(self, request: EngineRequest, core_request: EngineCoreRequest) -> EngineRequest:
        """Return the gateway's request without its texts, and with what its answer's length is predicted from, where it is predicted."""
        params, token_ids = core_request.sampling_params, core_request.prompt_token_ids
        known = replace(
            request,
            messages=(),
            tools=(),
            prompt_token_ids=None,
            history_token_ids=b"",
            client_salt=core_request.cache_salt,
        )
        if self._lengths is None or params is None or token_ids is None:
            return known
        room = self.model_config.max_model_len - len(token_ids)
        settings = setting_hints(
            is_structured=params.structured_outputs is not None,
            temperature=params.temperature,
            is_bounded=params.max_tokens is not None and params.max_tokens < room,
            has_stop=bool(params.stop or params.stop_token_ids),
            ignores_eos=params.ignore_eos,
        )
        # Only a user's own predictor reads the prompt; without it only numbers are held.
        is_read = self._lengths.own is not None
        return replace(
            known,
            num_prompt_tokens=len(token_ids),
            max_tokens=params.max_tokens,
            hints=request.asked.hints + settings,
            prompt_token_ids=token_ids if is_read else None,
        )

    async def predict_length(self, request: EngineCoreRequest) -> None:
        """Ask a user's own predictor for the length of the answer. Only this request waits for it, PATIENCE_S at most."""
        own = self._lengths.own if self._lengths is not None else None
        facts = facts_of(request)
        future = own.ask(facts) if own is not None and facts.num_prompt_tokens else None
        if own is None or future is None:
            return
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiting}, timeout=PATIENCE_S)
            if not waiting.done():
                own.note("late", f"takes longer than {PATIENCE_S} s: requests go on without it", None)
            elif waiting.exception() is None:
                tell_guess(request, waiting.result())
        finally:
            waiting.cancel()

    async def queue(
        self,
        unique_id: str,
        request: EngineCoreRequest,
        stream: Any,
        text: str | None,
        *,
        tenant: str,
        history: bytes | None,
    ) -> None:
        """Queue a validated request of an API, once its grammar is known to be harmless and its prompt begins with its session's ids.

        request: from `submit`. stream: where its outputs go. text: the prompt's, if it has any. history: the session's token ids so far, packed; None
        where the prompt continues no session. Raises BridgeError and vLLM's own errors: the request cannot be queued.
        """
        self.check_ready()
        self._streams.register(unique_id, stream)
        await self.check_grammar(request.sampling_params, tenant)
        await ban_all_forms(request.sampling_params, self.renderer)
        if self._sampler_room is not None and request.sampling_params is not None:
            check_room(request.sampling_params, self._sampler_room)
        if history and text is not None:
            await self._continue(request, history, text)
        await self.predict_length(request)
        self.launch(unique_id, request, text)

    async def check_grammar(self, params: SamplingParams | None, tenant: str) -> None:
        """Have a request's grammar checked; see `admission.check_grammar`."""
        config = self.vllm_config.structured_outputs_config
        await check_grammar(params, config, self._grammars, tenant, is_strict=current_call().is_strict)

    def launch(
        self, unique_id: str, request: EngineCoreRequest, text: str | None, until_s: float | None = None
    ) -> None:
        """Queue a submitted request on the engine thread. Raises InvalidRequest where its adapter was removed.

        `text` is the prompt's text, if it has any; for `until_s` see `AdapterWaits`.
        """
        self.versions.tie_to_served(request)
        self._waits.watch(unique_id, request, text, until_s)

        def add(driver: VllmDriver) -> None:
            """Add the request to the engine; its failure ends the stream."""
            try:
                driver.add(unique_id, request, text)
            except Exception as error:
                self._loop.call_soon_threadsafe(self._streams.fail, unique_id, error)

        self._loop = asyncio.get_running_loop()
        driver = self._thread.driver
        if driver is not None and request.lora_request is not None:
            driver.adapters.expect(request.lora_request.lora_int_id)  # a step may be under way for long
        self._thread.submit(add)

    def launch_in_background(self, unique_id: str, request: EngineCoreRequest) -> None:
        """Queue a submitted request behind all others, also behind later ones. Raises InvalidRequest as `launch` does."""
        self.versions.tie_to_served(request)
        self._thread.submit(lambda driver: driver.add_background(unique_id, request))

    def forget(self, unique_id: str, *, abort: bool) -> None:
        """Drop a stream; with `abort`, its request leaves the engine before the next step."""
        self._streams.forget(unique_id)
        if abort:
            self._thread.submit(lambda driver: driver.abort(unique_id))

    def check_ready(self) -> None:
        """Raise EngineUnavailable unless requests can be queued now."""
        if self._thread.state == "asleep":
            raise EngineUnavailable(ASLEEP, code="asleep")
        if self._thread.state not in ("ready", "draining"):
            raise EngineUnavailable(f"the engine is {self._thread.state}; try again in a few seconds")

    # -- EngineClient ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> Answer | AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a new request.

        This is a plain function that validates at once: bad parameters become a 400 before any header of a stream is sent. `priority`,
        `data_parallel_rank`, `session_id` and `kv_hints` come from clients and are ignored: CALL has the gateway's values.
        """
        call = current_call()
        if sampling_params.max_tokens == 0:
            return only_prompt(prompt, request_id, sampling_params.n)
        if not getattr(self.vllm_config.reasoning_config, "enabled", False):
            # A thinking budget can be left out at no cost. Some clients send it with every call, and vLLM refuses it for most models.
            sampling_params.thinking_token_budget = None
        if not reasoning_ended:
            self._hold_thought(sampling_params)
        if call.banned_token is not None:
            self._ban(sampling_params, [call.banned_token])
        collector = RequestOutputCollector(sampling_params.output_kind, request_id)
        try:
            self.check_ready()
            unique_id, request = self.submit(
                prompt,
                sampling_params,
                request_id,
                collector,
                request=call.request,
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
            )
        except Exception as error:
            call.failed(error)
            raise
        # The stream is registered only once the answer begins: an answer that is dropped before that must leave nothing behind.
        self.forget(unique_id, abort=False)
        if reasoning_ended is not None:
            request.reasoning_ended = reasoning_ended
        if reasoning_parser_kwargs is not None:
            request.reasoning_parser_kwargs = reasoning_parser_kwargs
        text = extract_prompt_components(self.model_config, prompt).text
        return Answer(self, call, unique_id, request, collector, text)

    def _hold_thought(self, params: SamplingParams) -> None:
        """Take from an answer that is held to a form the tokens that would end its thought and are no part of the form: it could not go on.

        Grammars may name tokens, so what they hold is left as it is.
        """
        form = params.structured_outputs
        if (
            form is not None
            and form.grammar is None
            and form.structural_tag is None
            and self._ends_of_thought
        ):
            self._ban(params, self._ends_of_thought)

    def _ban(self, params: SamplingParams, tokens: Iterable[int]) -> None:
        """Take tokens from an answer. Where answers are drafted, vLLM refuses a bias but not words that an answer may not hold."""
        if self.vllm_config.speculative_config is None:
            params.logit_bias = dict.fromkeys(tokens, -100.0) | (params.logit_bias or {})
        else:
            params._bad_words_token_ids = [[token] for token in tokens]

    async def _continue(self, request: EngineCoreRequest, history: bytes, text: str) -> None:
        """Replace the ids to which a session's text was encoded by the session's own, as far as they fit."""
        rendered = request.prompt_token_ids
        # The places of multimodal parts are counted in the rendered ids.
        if rendered is None or request.mm_features:
            return
        made = await self.continuing.continued(history, text, list(rendered), may_be_cut=True)
        request.prompt_token_ids = made.token_ids

    @property
    def is_running(self) -> bool:
        """Whether requests can be queued now."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether no request can be queued now."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine takes no requests now: it starts, has failed or is closed."""
        return self._thread.state not in ("ready", "draining")

    @property
    def dead_error(self) -> BaseException:
        """The error for requests while the engine takes none."""
        return engine_failed()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter and serve it under the id of its version, which is written into `lora_request`. Nothing is loaded yet."""
        try:
            await self.versions.add(lora_request)
        except Exception as error:
            failures = ADAPTER_FAILURES.get()
            if failures is not None:
                failures.append(error)
            raise
        return True

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the ids that their clients gave them."""
        wanted = {request_id} if isinstance(request_id, str) else set(request_id)
        for unique_id in self._streams.asked_as(wanted):
            self._streams.fail(unique_id, GenerationError("the request was aborted"))
            self.forget(unique_id, abort=True)

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Make the engine forget all KV of its prefix cache; returns whether it did."""
        return await self._thread.call(
            lambda driver: driver.engine.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        """Return the tasks that the engine's model can do."""
        return self._tasks

    async def is_tracing_enabled(self) -> bool:
        """Return False: vLLM traces no request here."""
        return False

    async def check_health(self) -> None:
        """Raise an error while the engine takes no requests."""
        if self.errored:
            raise self.dead_error

    async def _does_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    do_log_stats = _does_nothing  # the gateway has its own figures
    notify_kv_transfer_request_rejected = _does_nothing  # no other engine waits for this one's KV

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the node owns the thread and closes it."""

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: this server serves no pooling models."""
        raise NotImplementedError("this server generates text; it serves no pooling models")

    async def _not_offered(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not offered by the in-process engine")

    start_profile = stop_profile = reset_mm_cache = reset_encoder_cache = _not_offered
    sleep = wake_up = is_sleeping = release_kv_cache_memory = _not_offered
    pause_generation = resume_generation = is_paused = _not_offered
