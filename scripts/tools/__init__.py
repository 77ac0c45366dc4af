"""Programs for developers of kvjax, run from a checkout."""
