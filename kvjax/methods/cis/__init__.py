"""CIS: queries that resemble an earlier one share what it retrieved."""
