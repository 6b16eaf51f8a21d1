from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMServerError, VLLMValidationError

from engine_bridge.driver.apis.bodies import as_malformed, as_unusable
from engine_bridge.driver.apis.failures import CANNOT_CONTINUE, as_bridge_error, is_clients
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest, TooBusy


def raised(error: Exception) -> Exception:
    """As it is caught: with the place where it was raised."""
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidRequest("too many choices", param="n"), 400, "too many choices"),
        (VLLMValidationError("too many choices", parameter="n"), 400, "too many choices"),
        (NotImplementedError("no beams here"), 400, "no beams here"),
        (EngineUnavailable("starting"), 503, ""),
        (RetryableRequestError("again"), 503, ""),
        (VLLMServerError("broken"), 500, ""),
        (OSError("disk full"), 500, ""),
        (MemoryError(), 500, ""),
    ],
)
def test_what_is_refused_on_purpose_keeps_its_words(error: Exception, status: int, message: str) -> None:
    response = as_malformed(raised(error))
    assert response.error.code == status and message in response.error.message
    assert response.error.param == ("n" if "choices" in message else None)


PLAIN = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


def rendered(template: str) -> Exception:
    """What vLLM's renderer makes of a template that raises."""

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.Environment()
    environment.globals["raise_exception"] = refuse
    try:
        environment.from_string(template).render()
    except Exception as error:
        try:
            raise VLLMValidationError(str(error)) from error
        except VLLMValidationError as wrapped:
            return wrapped
    raise AssertionError("the template does not raise")


READER = """
def refuses(value):
    raise ValueError(f"{value} does not fit")
def trips(value):
    int(value)
def asserts(value):
    assert value == "few", "there are too many"
def wraps(value):
    try:
        int(value)
    except ValueError as error:
        raise ValueError(str(error)) from error
"""


def test_a_plain_value_error_is_the_clients_only_where_reading_code_raises_it_on_purpose() -> None:
    refusing = {("vllm.renderers", "refuses"), ("mistral_common", "asserts")}
    ours = {("vllm.v1.core", "refuses"), ("engine_bridge", "refuses")}
    tripping = {("vllm.renderers", name) for name in ("trips", "wraps", "asserts")}
    for package, function in refusing | ours | tripping:
        names: dict[str, Any] = {"__name__": f"{package}.made_up"}
        exec(READER, names)
        with pytest.raises((ValueError, AssertionError)) as caught:
            names[function]("many")
        assert is_clients(caught.value) is ((package, function) in refusing)


def test_what_may_be_tried_again_stays_so() -> None:
    later, elsewhere = GracefulHTTPError("later", 429), GracefulHTTPError("elsewhere", 503)  # type: ignore[arg-type]
    assert isinstance(as_bridge_error(raised(later)), TooBusy)
    starting = EngineUnavailable("starting", code="starting")
    for error in (elsewhere, RetryableRequestError("again"), TimeoutError(), starting):
        assert isinstance(as_bridge_error(raised(error)), EngineUnavailable)


def test_where_a_field_holds_what_it_likes_that_field_is_blamed_without_insides() -> None:
    function = {"name": "f", "parameters": {"required": 5}}
    schema = {"type": "json_schema", "json_schema": {"schema": 5}}
    properties = {f"p{number}": {"type": "string"} for number in range(2000)}  # not looked at for long
    large = {"name": "f", "parameters": {"properties": properties}}
    for more, part in (
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": function}]}, "required"),
        ({"tools": [{"name": "f", "input_schema": {"required": 5}}]}, "required"),
        ({"tools": [{"type": "function", "function": large}]}, ""),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": {}}]}]}, "form"),
        ({"input": [{"type": "reasoning", "summary": 3}]}, "form"),
        ({"response_format": schema}, "form"),
        ({"prompt": [-1]}, "form"),
        ({"seed": 2**70}, "form"),
    ):
        response = as_unusable(raised(TypeError("'int' object is not iterable")), PLAIN | more)
        assert response.error.code == 400
        assert part in response.error.message and "iterable" not in response.error.message


@pytest.mark.parametrize(
    "body",
    [
        {"query": "a", "documents": ["b", "c"], "top_n": 1},
        {"text_1": ["a"], "text_2": ["b"]},
        {"input": [[4, 5], [6]]},
        {"input": [4, 5]},
    ],
)
def test_texts_and_token_ids_are_not_blamed_for_a_failure_of_the_models(body: Any) -> None:
    """Such as a score that is no number, which JSON cannot hold."""
    assert as_unusable(raised(ValueError("Out of range float values")), body).error.code == 500


def test_a_server_without_a_thread_left_blames_no_body() -> None:
    refused = as_unusable(
        raised(RuntimeError("can't start new thread")), PLAIN | {"structured_outputs": {"regex": "x"}}
    )
    assert (refused.error.code, refused.error.param) == (503, None)


def test_what_a_template_refuses_is_told_in_its_words_and_a_beginning_that_it_leaves_out_in_ours() -> None:
    """As templates do that drop the reasoning of earlier answers. The library's error quotes the whole chat."""
    alternates = rendered("{{ raise_exception('Roles must alternate.') }}")
    assert as_unusable(alternates, PLAIN).error.code == 400
    told = as_bridge_error(alternates)
    assert isinstance(told, InvalidRequest) and "Roles must alternate." in str(told)
    said = "<think>x</think>Hello"
    chat = [{"role": "user", "content": "a secret"}, {"role": "assistant", "content": said}]
    template = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    try:
        render_jinja_template([chat], chat_template=template, continue_final_message=True)
    except ValueError as error:
        refused = VLLMValidationError(str(error))
        refused.__cause__ = error
    response = as_unusable(raised(refused), {"messages": chat})
    assert (response.error.code, response.error.message) == (400, CANNOT_CONTINUE)


def test_a_template_that_fails_on_a_conversation_is_told_with_what_to_do_and_without_its_text() -> None:
    for template, reason in (
        ("{{ messages[0].tool_calls.name }}", ": 'messages' is undefined"),
        ("{{ 'a secret' + 1 }}", ""),
        ("{{ {}['a secret' | int] | length + 'a secret' | float / 0 }}", ""),
    ):
        failed = rendered(template)
        response = as_unusable(failed, PLAIN)
        assert response.error.code == 400 and "secret" not in response.error.message
        assert f"fails on this conversation{reason}. Leave out" in response.error.message
        assert isinstance(as_bridge_error(failed), InvalidRequest)
