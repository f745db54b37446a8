"""The HTTP surface: OpenAI's endpoints over the engine client."""
