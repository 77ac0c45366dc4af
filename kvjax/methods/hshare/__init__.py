"""HShare: critical tokens shared between steps, heads and layers."""
