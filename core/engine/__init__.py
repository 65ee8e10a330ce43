"""The engine: the step pipeline, the process around it, and the two front ends (async client, offline LLM)."""
