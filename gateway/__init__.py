"""The gateway: chat page, chat socket and OpenAI-style API before the engine. Import the modules; this package stays light."""
