"""Short programs that show the uses of kvjax; each runs as `python -m scripts.examples.<name>`."""
