"""Attention of decoded tokens: all slots, or those that a plan lists."""
