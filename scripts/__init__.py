"""Command-line programs of kvjax, each run as `python -m scripts.<name>`."""
