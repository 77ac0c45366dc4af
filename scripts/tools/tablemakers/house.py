"""Tables of the house, which is drawn from the code."""

from scripts.tools.house import compositions, moves, rooms

__all__ = ["compositions", "moves", "rooms"]
