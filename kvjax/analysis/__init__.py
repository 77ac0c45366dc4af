"""Certificates, diagnostics, early stops, bytes moved: knowledge about a run."""
