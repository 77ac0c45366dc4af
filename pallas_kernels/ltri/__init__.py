"""Ltri-LLM: division of attention maps into spans."""
