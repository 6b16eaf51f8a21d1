"""Live bench of agents that call tools: programs, the loops of three SDKs and of a framework that play them, and how their sessions were found."""
