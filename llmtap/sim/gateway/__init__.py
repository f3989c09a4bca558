"""A gateway in the form of OpenAI's, Anthropic's and Ollama's: an engine or a fixed schedule on a socket."""
