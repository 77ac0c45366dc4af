"""Operations of the moves: what each computes, what its kernel cannot do, and the choice."""
