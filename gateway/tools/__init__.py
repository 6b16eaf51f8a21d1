"""Tools of MCP servers that an operator has named: what a model is offered of them, and calls of them. Source: modelcontextprotocol.io."""
