"""Knowledge about a run: certificates, diagnostics, early stops, bytes moved."""
