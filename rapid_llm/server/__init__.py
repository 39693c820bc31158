"""An OpenAI-compatible HTTP server around one `LLM`. Needs the extra `serve`: pip install 'rapid-llm[serve]'."""
