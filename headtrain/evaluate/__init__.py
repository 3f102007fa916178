"""Honest measurement: the same prompts decoded with and without drafts, and what came of it."""
