"""LongFlow: eviction by what a token contributes to the newest output."""
