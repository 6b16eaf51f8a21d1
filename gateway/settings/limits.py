"""The settings of the group "Limits": what one request and one key may ask for. docs/operations/limits.md says what each one bounds."""

from typing import Annotated

from msgspec import Meta

from engine_bridge.settings.engine_config import EngineSettings, NonEmpty, Positive, in_limits


class LimitSettings(EngineSettings, frozen=True, kw_only=True):
    """The limits of a server. An engine's own limits are among its settings."""

    max_json_values: Annotated[
        Positive | None,
        in_limits("Most values in one JSON body; unset: 50,000, or four times what the model reads."),
    ] = None
    max_json_depth: Annotated[int, in_limits("Deepest nesting of one JSON body.", ge=8, le=512)] = 64
    max_messages: Annotated[int, in_limits("Most messages in one call.", ge=1)] = 2048
    max_prompt_chars: Annotated[
        Positive | None,
        in_limits("Longest prompt in characters; unset: 16 for each token that the model reads."),
    ] = None
    allow_image_hosts: Annotated[
        tuple[NonEmpty, ...],
        in_limits(
            "A host that pictures may be fetched from by their address, such as upload.wikimedia.org; unset: none."
        ),
    ] = ()
    max_sequences: Annotated[int, in_limits("Most answers in one call: prompts × n.", ge=1)] = 256
    max_embedding_inputs: Annotated[int, in_limits("Most inputs in one call for embeddings.", ge=1)] = 2048
    max_stop_strings: Annotated[int, in_limits("Most stop strings of a request.", ge=1)] = 64
    max_bad_words: Annotated[int, in_limits("Most bad words of a request.", ge=1)] = 256
    max_logit_bias: Annotated[
        int, in_limits("Most entries of logit_bias, and of token ids to stop at.", ge=1)
    ] = 1024
    max_answer_logprobs: Annotated[
        int, in_limits("Most log probabilities in one answer that is not streamed.", ge=1)
    ] = 20_000
    max_grammar_kib: Annotated[
        int, in_limits("Largest grammar or JSON schema of structured output, in KiB.", ge=1)
    ] = 256
    max_grammar_rules: Annotated[int, in_limits("Most rules and alternatives of a grammar.", ge=1)] = 2000
    max_schema_values: Annotated[int, in_limits("Most values in a JSON schema.", ge=1)] = 10_000
    max_choices: Annotated[int, in_limits("Most strings to choose from in structured output.", ge=1)] = 1000
    max_regex_chars: Annotated[int, in_limits("Longest regular expression.", ge=1)] = 8192
    max_regex_repeat: Annotated[
        int, in_limits("Largest bound in a regular expression, as in {1,1000}.", ge=1)
    ] = 1000
    grammar_check_s: Annotated[
        float, in_limits("How long checking one grammar may take, in seconds.", gt=0)
    ] = 5.0
    grammar_check_mib: Annotated[
        int, in_limits("How much memory checking one grammar may take, in MiB.", ge=64)
    ] = 512
    document_s: Annotated[float, in_limits("How long reading one document may take, in seconds.", gt=0)] = (
        20.0
    )
    document_mib: Annotated[
        int, in_limits("How much memory reading one document may take, in MiB.", ge=64)
    ] = 512
    max_stored_mib: Annotated[
        int, in_limits("Text of conversations that each key may store, in MiB; 0: no limit.", ge=0)
    ] = 1024

    max_requests_per_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        in_limits(
            "Requests a second with one key, and five times as many at once; unset: 100, without keys 1000."
        ),
    ] = None
    max_requests_per_min: Annotated[
        int,
        in_limits(
            "API calls and chat messages a minute that the model answers one person, as many of which may come at once; 0: no limit.",
            ge=0,
        ),
    ] = 0
    max_tokens_per_day: Annotated[
        int,
        in_limits("Tokens of prompts and answers that each person may use a day (UTC); 0: no limit.", ge=0),
    ] = 0
    max_concurrent_requests: Annotated[
        Positive | None,
        in_limits(
            "API calls and chat turns of one key under way; unset: 4 × max_num_seqs (64 or more; on a GPU 1024), without keys 10 times as many."
        ),
    ] = None
