"""ART: stop walking the cache when the output has stopped moving."""
