"""Models of other code bases under any KV cache; `scripts/README.md` lists them."""
