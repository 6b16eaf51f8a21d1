"""The doors of the OpenAI, Anthropic and vLLM APIs."""
