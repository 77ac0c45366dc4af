"""Ltri-LLM: spans found by triangle-shaped attention, kept in host memory."""
