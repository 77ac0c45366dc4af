"""Records that methods and operations hand each other: caches, plans, where a move runs."""
