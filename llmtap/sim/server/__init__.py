"""Simulated server with the APIs of OpenAI, Anthropic and Ollama, over HTTP, WebSocket and gRPC."""
