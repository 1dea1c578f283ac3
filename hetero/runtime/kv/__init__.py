"""The KV cache, contexts and sessions: texts that a model continues, as values."""
