"""The settings of a node: an engine, and the adapters and limits that it is served with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from engine_bridge.calls.context_overflow import ContextOverflow
from engine_bridge.calls.plain_content import ContentFormat, SpecialTokensInContent
from engine_bridge.cluster.peers import PeerConfig
from engine_bridge.policy.limits.request_limits import RequestLimits
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.parser_choice import AUTO


class LocalNodeConfig(Struct, frozen=True, kw_only=True):
    """An engine, and the adapters and settings that are served with it.

    Attributes:
        adapters: (name, folder) pairs that are served from the start.
        adapters_dir: a folder whose adapters are served, now and as they come, change and go.
        state_dir: where the registry of adapters and the learned lengths of answers are kept; None: in memory.
        length_predictor: `module:Name` of a user's own, which is asked before ours.
        limits: of what one request may ask.
        default_chat_template_kwargs: what every conversation is rendered with, apart from what its request says.
        chat_template_content_format: the form in which the chat template gets contents; auto: as vLLM reads off the template.
        api_switches: what of vLLM's API classes is switched on for every call, by their arguments' names.
        peers: where KV is lent to other nodes; None: to none.
    """

    engine: EngineConfig
    adapters: tuple[tuple[str, str], ...] = ()
    adapters_dir: Path | None = None
    state_dir: Path | None = None
    length_predictor: str | None = None
    limits: RequestLimits = RequestLimits()
    tool_parser: str = AUTO
    context_overflow: ContextOverflow = "error"
    special_tokens_in_content: SpecialTokensInContent = "keep"
    default_chat_template_kwargs: dict[str, Any] = {}
    chat_template_content_format: ContentFormat = "auto"
    api_switches: tuple[str, ...] = ()
    peers: PeerConfig | None = None
