"""LongFlow: attention that names the slot to be given up."""
