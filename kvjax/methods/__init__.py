"""Methods, one paper a file or folder, and the table of their names (`registry`)."""
