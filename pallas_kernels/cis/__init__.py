"""CIS: shared selections, their lists, and the attention over them."""
