"""A method's moves and their order (`method`), and what several methods share."""

import kvjax.families.sliding  # noqa: F401 — `Method.init_caches` asks it for a model's layers
