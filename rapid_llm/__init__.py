"""RapidLLM: LLM inference in which every operator is a declared, verified and measured choice."""
