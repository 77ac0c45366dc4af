"""Further suites of `kvjax bench`, run from a checkout."""
