"""Programs of kvjax: of users (`programs`), and of those who build it."""
