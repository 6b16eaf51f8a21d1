"""vLLM's OpenAI and Anthropic serving classes, its renderer, and the client that they talk to."""

from engine_bridge.driver.vllm_api.features import (
    APIS,
    CLIENT_FIELDS,
    KEPT_TOKENS,
    PLAIN_CONTENT,
    TOKENIZER_TURNS,
)
from engine_bridge.driver.vllm_api.uses import (
    builds,
    calls,
    implements,
    overrides,
    overrides_values,
    owner,
    reads,
    replaces,
    writes,
)

_PARSERS = "request_logger, chat_template, chat_template_content_format, enable_auto_tools, tool_parser, reasoning_parser"
# Fields of clients' requests that the gateway alone may set: `SERVER_FIELDS` in `engine_bridge/driver/apis/bodies.py`.
_SERVER_FIELDS = "priority kv_transfer_params vllm_xargs"

OWNERS = (
    # -- the client --------------------------------------------------------------------------------------------------
    owner(
        "vllm.engine.protocol:EngineClient",
        APIS,
        implements(
            "is_running is_stopped errored dead_error generate encode abort notify_kv_transfer_request_rejected"
        ),
        implements("is_tracing_enabled do_log_stats check_health start_profile stop_profile reset_mm_cache"),
        implements(
            "reset_encoder_cache reset_prefix_cache sleep release_kv_cache_memory wake_up is_sleeping add_lora"
        ),
        implements("pause_generation resume_generation is_paused shutdown"),
        overrides(
            "generate(prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, tokenization_kwargs=None,"
            " trace_headers=None, priority=0, data_parallel_rank=None, session_id=None, kv_hints=None, reasoning_ended=None,"
            " reasoning_parser_kwargs=None)",
            "abort(request_id)",
            "add_lora(lora_request)",
            "reset_prefix_cache(reset_running_requests=False, reset_connector=False)",
            "shutdown(timeout=None)",
        ),
        writes("input_processor model_config renderer vllm_config"),
    ),
    owner("vllm.renderers.inputs.preprocess", APIS, calls("extract_prompt_components(model_config, prompt)")),
    owner("vllm.renderers.inputs.preprocess:PromptComponents", APIS, reads("text")),
    owner(
        "vllm.exceptions",
        APIS,
        reads(
            "GenerationError GracefulHTTPError RetryableRequestError VLLMClientError VLLMError VLLMServerError VLLMValidationError"
        ),
    ),
    owner("vllm.exceptions:VLLMValidationError", APIS, builds("message")),
    # -- the renderer ------------------------------------------------------------------------------------------------
    owner(
        "vllm.renderers.online_renderer:OnlineRenderer",
        APIS,
        builds(f"model_config, renderer, *, {_PARSERS}"),
        calls("warmup()", "render_chat(request)"),
    ),
    owner(
        "vllm.renderers.base:BaseRenderer",
        APIS,
        calls("get_tokenizer()"),
        calls("validate_token_ids(token_ids)", feature=KEPT_TOKENS),
        reads("_executor", KEPT_TOKENS),
        reads("_executor", TOKENIZER_TURNS),
        reads("_executor", PLAIN_CONTENT),
        replaces("render_messages_async(messages, params)", feature=PLAIN_CONTENT),
        replaces("tokenize_prompts_async(prompts, params)", feature=PLAIN_CONTENT),
        at="renderer",
    ),
    owner(
        "vllm.renderers.base:_SwappableExecutor",
        TOKENIZER_TURNS,
        writes("_inner"),
        reads("_max_workers"),
        replaces("replace_inner()"),
        at="renderer._executor",
    ),
    owner("vllm.renderers.params:ChatParams", PLAIN_CONTENT, reads("chat_template_kwargs")),
    owner(
        "vllm.renderers.params:TokenizeParams",
        PLAIN_CONTENT,
        calls("apply_pre_tokenization(tokenizer, prompt)", "get_encode_kwargs()"),
    ),
    # -- the APIs ----------------------------------------------------------------------------------------------------
    owner(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels",
        APIS,
        builds("engine_client, base_model_paths"),
        calls(
            "load_lora_adapter(request)",
            "unload_lora_adapter(request)",
            "show_available_models()",
            "is_base_model(model_name)",
        ),
        reads("lora_requests"),
    ),
    owner("vllm.entrypoints.openai.models.protocol:BaseModelPath", APIS, builds("name, model_path")),
    owner(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        APIS,
        builds(
            f"engine_client, models, response_role, *, online_renderer, enable_prompt_tokens_details, {_PARSERS}"
        ),
        calls("create_chat_completion(request, raw_request)"),
        overrides(
            "chat_completion_stream_generator(request, *args, **options)",
            "chat_completion_full_generator(request, *args, **options)",
        ),
        reads("default_sampling_params parser_cls"),
    ),
    owner(
        "vllm.parser.abstract_parser:DelegatingParser",
        APIS,
        builds("tokenizer, tools, *, chat_template_kwargs, model_config"),
        calls("parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, *, finished)"),
        reads("reasoning_parser"),
    ),
    owner("vllm.reasoning.abs_reasoning_parsers:ReasoningParser", APIS, reads("reasoning_start_str")),
    owner(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion",
        APIS,
        builds("engine_client, models, *, online_renderer, request_logger, enable_prompt_tokens_details"),
        calls("create_completion(request, raw_request)"),
        overrides(
            "completion_stream_generator(request, engine_inputs, result_generator, *args, **options)",
            "request_output_to_completion_response(final_res_batch, request, *args, **options)",
        ),
    ),
    owner(
        "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses",
        APIS,
        builds(f"engine_client, models, online_renderer, *, {_PARSERS}"),
        calls("create_responses(request, raw_request)"),
        overrides(
            "responses_stream_generator(request, sampling_params, result_generator, *args, **options)",
            "_make_response_output_items(request, final_output, *args, **options)",
            "_create_response_logprobs(token_ids, logprobs, *args, **options)",
        ),
    ),
    owner(
        "vllm.entrypoints.serve.tokenize.serving:ServingTokenization",
        APIS,
        builds("models, online_renderer, *, chat_template, chat_template_content_format"),
        calls(
            "create_tokenize(request, raw_request)",
            "create_detokenize(request, raw_request)",
            "get_tokenizer_info()",
        ),
    ),
    owner("vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest", APIS),
    owner("vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest", APIS),
    owner("vllm.entrypoints.serve.tokenize.protocol:TokenizeResponse", APIS),
    owner("vllm.entrypoints.serve.tokenize.protocol:TokenizerInfoResponse", APIS),
    owner("vllm.entrypoints.serve.tokenize.protocol:DetokenizeRequest", APIS),
    owner("vllm.entrypoints.serve.tokenize.protocol:DetokenizeResponse", APIS),
    owner(
        "vllm.entrypoints.openai.responses.api_router",
        APIS,
        calls("_convert_stream_to_sse_events(generator)"),
    ),
    owner(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
        APIS,
        builds(
            f"engine_client, models, response_role, *, online_renderer, enable_prompt_tokens_details, {_PARSERS}"
        ),
        calls("create_messages(request, raw_request)", "count_tokens(request, raw_request)"),
        overrides(
            "to_chat_completion_request(anthropic_request, **options)",
            "messages_full_converter(generator)",
            "message_stream_converter(generator)",
            "chat_completion_stream_generator(request, result_generator, *args, **options)",
        ),
    ),
    owner("vllm.entrypoints.anthropic.api_router", APIS, calls("translate_error_response(response)")),
    # -- bodies and replies -------------------------------------------------------------------------------------------
    owner(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        APIS,
        reads("messages stream temperature top_p top_k stop seed ignore_eos"),
        calls("to_sampling_params(max_tokens, default_sampling_params)"),
        reads(_SERVER_FIELDS, CLIENT_FIELDS),
    ),
    owner("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse", APIS),
    owner(
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
        APIS,
        overrides("to_sampling_params(*args, **options)"),
        reads("echo max_tokens return_token_ids"),
        reads(_SERVER_FIELDS, CLIENT_FIELDS),
    ),
    owner("vllm.entrypoints.openai.completion.protocol:CompletionResponse", APIS),
    owner(
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
        APIS,
        reads("priority", CLIENT_FIELDS),
    ),
    owner("vllm.entrypoints.openai.responses.protocol:ResponsesResponse", APIS),
    owner(
        "vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent",
        APIS,
        reads("response"),
    ),
    owner("vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest", APIS),
    owner("vllm.entrypoints.anthropic.protocol:AnthropicMessagesResponse", APIS),
    owner("vllm.entrypoints.anthropic.protocol:AnthropicCountTokensRequest", APIS),
    owner("vllm.entrypoints.anthropic.protocol:AnthropicCountTokensResponse", APIS),
    # -- tool calls and reasoning -----------------------------------------------------------------------------------
    owner(
        "vllm.tool_parsers.abstract_tool_parser:ToolParser",
        APIS,
        builds("tokenizer, tools"),
        calls("adjust_request(request)"),
        overrides(
            "adjust_request(request)",
            "get_structural_tag(request, **options)",
            "extract_tool_calls(model_output, request)",
            "extract_tool_calls_streaming(previous_text, current_text, delta_text, previous_token_ids, current_token_ids,"
            " delta_token_ids, request)",
        ),
        overrides_values("supports_required_and_named"),
    ),
    owner(
        "vllm.tool_parsers.abstract_tool_parser:ToolParserManager",
        APIS,
        calls("get_tool_parser(name)", "list_registered()", "register_module(*, name, module)"),
    ),
    owner(
        "vllm.reasoning.abs_reasoning_parsers:ReasoningParserManager",
        APIS,
        calls("get_reasoning_parser(name)", "list_registered()"),
    ),
    owner("vllm.entrypoints.generate.base.protocol:DeltaMessage", APIS, builds("*, content")),
    owner(
        "vllm.entrypoints.generate.base.protocol:ExtractedToolCallInformation",
        APIS,
        builds("*, tools_called, tool_calls, content"),
    ),
    owner("vllm.entrypoints.serve.engine.protocol:ErrorResponse", APIS, reads("error")),
    owner("vllm.entrypoints.serve.engine.protocol:ErrorInfo", APIS, reads("code message type")),
    owner("vllm.entrypoints.serve.engine.protocol:ModelCard", APIS),
    owner("vllm.entrypoints.serve.engine.protocol:ModelList", APIS),
    owner(
        "vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest",
        APIS,
        reads("load_inplace lora_name lora_path"),
    ),
    owner("vllm.entrypoints.serve.lora.protocol:UnloadLoRAAdapterRequest", APIS, reads("lora_name")),
    owner("vllm.entrypoints.serve", APIS, calls("create_error_response(message, *, param)")),
    owner(
        "vllm.entrypoints.serve.utils.api_utils",
        APIS,
        calls("get_max_tokens(max_model_len, max_tokens, input_length, default_sampling_params)"),
    ),
    owner(
        "vllm.entrypoints.serve.utils.sse_keep_alive", APIS, calls("with_sse_keep_alive(generator, interval)")
    ),
)
