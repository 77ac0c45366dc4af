"""One paper, one file. `kvjax.registry` lists them."""
