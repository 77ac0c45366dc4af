"""References of operations, and which implementation runs: what each computes and cannot do."""
