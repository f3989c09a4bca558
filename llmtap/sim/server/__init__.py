"""A server like OpenAI's, Anthropic's and Ollama's, over HTTP, WebSocket and gRPC, on a real clock."""
