"""Products with weights around attention."""
