"""The chat template of a model, and a plain one for models that have none: base models, which were made to continue a text."""

from __future__ import annotations

import logging
from typing import Any

from jinja2 import TemplateSyntaxError

from engine_bridge.calls.template_rules import PLACES, Place, TemplateRules
from engine_bridge.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_PLAINLY = "conversations are written as `User: …` and `Assistant: …`; a better one is given with --chat-template FILE"


def fault_of(template: str) -> str:
    """Return why a text is no template, with the line; "" if it is one."""
    # As transformers, and so vLLM, reads it, with tags that Jinja alone does not know.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def chat_templates(engine: Any, given: str | None) -> tuple[str | None, str]:
    """Return the template that vLLM is to be given, None where it finds the model's own, and the template that conversations are rendered with.

    given: the operator's. The second is, for models whose conversations vLLM renders without a template, the special tokens of which it makes them.

    Raises:
        InvalidRequest: the operator's is no template. Where the model's own is none, a plain one stands in for it.
    """
    from engine_bridge.driver.vllm_api import HfRenderer, resolve_chat_template

    tokenizer = engine.renderer.get_tokenizer()
    _complete(tokenizer)
    own = own_template(tokenizer)
    if given and (fault := fault_of(given)):
        raise InvalidRequest(f"--chat-template: the file is no Jinja template: {fault}")
    if not given and (fault := fault_of(own)):
        log.warning(
            "this model's chat template is no Jinja template (%s): %s",
            fault,
            _PLAINLY,
        )
        return PLAIN, PLAIN
    if given or own:
        return given, given or own
    if not isinstance(engine.renderer, HfRenderer):
        return None, " ".join(getattr(tokenizer, "all_special_tokens", ()))
    found = resolve_chat_template(tokenizer, None, None, model_config=engine.model_config)
    if found:
        return None, found
    log.warning("this model has no chat template: %s", _PLAINLY)
    return PLAIN, PLAIN


def follow_template(renderer: Any, model_config: Any, given: str | None) -> None:
    """Make a vLLM renderer give conversations the form that its chat template takes.

    vLLM moves later instructions to the beginning, where each new one changes all that comes behind it, or passes them on, and the template fails or
    leaves them out. Renderers without a template are left as they are. given: the operator's template.
    """
    from engine_bridge.driver.vllm_api import HfRenderer, resolve_chat_template

    if not isinstance(renderer, HfRenderer):
        return
    tokenizer = renderer.get_tokenizer()
    # Some models have another template for calls with tools.
    ways: tuple[list[Any] | None, ...] = (None, [])
    variants = {resolve_chat_template(tokenizer, given, way, model_config=model_config) for way in ways}
    found = [rules_of(tokenizer, variant) for variant in variants if variant] or [TemplateRules()]
    rules = TemplateRules(
        min((each.place for each in found), key=PLACES.index),
        all(each.has_developer for each in found),
        any(each.alternates for each in found),
    )
    if rules.place != "anywhere":
        where = "at the beginning alone" if rules.place == "first" else "nowhere"
        log.info("the chat template takes instructions %s: others become part of a question", where)
    render = renderer.render_messages_async

    async def render_messages(messages: Any, params: Any) -> Any:
        """Render a conversation in the form that the template takes."""
        return await render(rules.applied(messages), params)

    renderer.render_messages_async = render_messages


def rules_of(tokenizer: Any, template: str) -> TemplateRules:
    """Return what a chat template takes, as it renders some messages."""

    def takes(*roles: str, in_parts: bool) -> bool:
        """Return whether the text of messages with these roles is rendered, at least that of all who ask or instruct."""
        words = [f"word{number}" for number in range(len(roles))]
        messages = [
            {"role": role, "content": [{"type": "text", "text": word}] if in_parts else word}
            for role, word in zip(roles, words, strict=True)
        ]
        try:
            text = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template may raise anything
            return False
        return all(word in text for role, word in zip(roles, words, strict=True) if role != "assistant")

    in_parts = not takes("user", in_parts=False)
    if in_parts and not takes("user", in_parts=True):
        return TemplateRules()  # unknown: messages stay as they are
    later = (
        ("user", "system"),
        ("system", "user", "system", "user"),
        ("user", "assistant", "system", "user"),
    )
    place: Place = "first"
    if not takes("system", "user", in_parts=in_parts):
        place = "nowhere"
    elif all(takes(*roles, in_parts=in_parts) for roles in later):
        place = "anywhere"
    # Where a template that does not name the role writes it all the same, the model has not learned it.
    names_developer = "'developer'" in template or '"developer"' in template
    return TemplateRules(
        place,
        has_developer=names_developer and takes("developer", "user", in_parts=in_parts),
        alternates=takes("user", "assistant", "user", in_parts=in_parts)
        and not takes("user", "user", in_parts=in_parts),
    )


# Renderings of these differ where a call begins in one and a text in the other.
_ASKED = {"role": "user", "content": "Hello"}
_TEXT = {"role": "assistant", "content": "word"}
_TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
_TOOL_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
_CALL = {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]}


def opener_of_calls(tokenizer: Any, given: str | None) -> int | None:
    """Return the token by which a model begins a tool call and no text, as its chat template writes both; None where calls begin with usual tokens.

    given: the operator's template; None: the model's own.
    """

    def ids(answer: Any) -> list[int]:
        """Return the tokens of a conversation that ends with this answer."""
        text = tokenizer.apply_chat_template(
            [_ASKED, answer],
            tools=[{"type": "function", "function": _TOOL}],
            chat_template=given,
            tokenize=False,
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    try:
        of_text, of_call = ids(_TEXT), ids(_CALL)
        pairs = enumerate(zip(of_text, of_call, strict=False))
        num_alike = next((at for at, (one, other) in pairs if one != other), 0)
        first = next((each for each in of_call[num_alike:] if tokenizer.decode([each]).strip()), None)
        marks = set(tokenizer.get_added_vocab().values()) - {*of_text, tokenizer.eos_token_id}
    except Exception:  # a template may raise anything, and tokenizers that vLLM brings lack some of this
        return None
    return first if first in marks else None


def own_template(tokenizer: Any) -> str:
    """Return the template of a tokenizer, or all of those that it has by names, such as one for calls with tools; "" without any."""
    found: str | dict[str, str] = getattr(tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(found.values())


def _complete(tokenizer: Any) -> None:
    """Give a tokenizer whose templates are for some calls alone, such as those with tools, one for all others: its own, or else a plain one."""
    named = getattr(tokenizer, "chat_template", None)
    if not named or isinstance(named, str) or "default" in named:
        return
    name = next((name for name, template in named.items() if _renders(tokenizer, template)), "")
    tokenizer.chat_template = named | {"default": named.get(name, PLAIN)}
    others = f"others are written by `{name}`" if name else f"in others {_PLAINLY}"
    log.warning("this model has chat templates for some calls alone (%s): %s", ", ".join(named), others)


def _renders(tokenizer: Any, template: str) -> bool:
    """Return whether a template writes a question that offers no tools."""
    try:
        text = tokenizer.apply_chat_template([_ASKED], chat_template=template, tokenize=False)
    except Exception:  # a template may raise anything
        return False
    return _ASKED["content"] in text
