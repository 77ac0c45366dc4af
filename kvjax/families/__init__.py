"""A method's moves and their order (`method`), and what several methods share."""
