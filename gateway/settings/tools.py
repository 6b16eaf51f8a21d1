"""The settings of the group "Tools": MCP servers, and bounds of calls of their tools. docs/operations/tools.md describes them."""

from functools import partial
from typing import Annotated

from engine_bridge.settings.engine_config import NonEmpty, setting
from gateway.settings.limits import LimitSettings

in_tools = partial(setting, "Tools")


class ToolSettings(LimitSettings, frozen=True, kw_only=True):
    """The MCP servers that an operator names, and what one call may take."""

    mcp_servers: Annotated[
        tuple[NonEmpty, ...],
        in_tools(
            "MCP server whose tools conversations of the page may use, as NAME=URL (streamable HTTP); may be repeated. People switch each on, and "
            "are asked before a tool is used."
        ),
    ] = ()
    mcp_timeout_s: Annotated[
        float, in_tools("How long one call of a tool may take, in seconds.", gt=0, le=3600)
    ] = 30.0
    mcp_result_kib: Annotated[
        int, in_tools("Most of a tool's result that the model and the person read, in KiB.", ge=1, le=1024)
    ] = 32
    mcp_rounds: Annotated[int, in_tools("How often an answer may call tools and go on.", ge=1, le=100)] = 8
