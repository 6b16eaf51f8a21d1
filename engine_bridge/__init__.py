"""One node: all between the gateway and vLLM."""
