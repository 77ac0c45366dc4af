"""The decoder: layers, experts, parallel products, configurations."""
