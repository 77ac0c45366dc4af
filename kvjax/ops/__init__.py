"""Operations that methods share: attention over slots and prompts, moving and ranking slots."""
