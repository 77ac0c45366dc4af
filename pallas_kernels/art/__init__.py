"""ART's walk, which ends when the output has stopped moving."""
