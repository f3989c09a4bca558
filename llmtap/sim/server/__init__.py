"""A gateway as OpenAI, Anthropic and Ollama have one, over HTTP, WebSocket and gRPC, on a real clock."""
