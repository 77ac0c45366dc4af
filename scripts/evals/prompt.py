"""Rows as token ids: what is read before the question, and from the question on."""

import dataclasses

from kvjax.models.tokenizer import Tokenizer

from .task import Count, Row

_MARK = "\ue000"  # a character of no script


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a row.

  The two parts are encoded apart, so that a cache filled with `head` before the question is known
  and one filled with both at once have read the same tokens.

  Attributes:
    head: the context, and the chat markup before it.
    tail: the question, the markup behind it, and the beginning of the answer.
  """

  head: list[int]
  tail: list[int]

  @property
  def ids(self) -> list[int]:
    return self.head + self.tail


class Reader:
  """Encodes rows for one tokenizer.

  Args:
    tokenizer: of the model.
    chat: put a row as a user's turn of a chat, where the tokenizer has a chat template; plain text
      otherwise.
  """

  def __init__(self, tokenizer: Tokenizer, *, chat: bool = True):
    self._tokenizer = tokenizer
    self._markup: tuple[str, str] | None = None
    if chat and tokenizer.chat_template is not None:
      # Rendered once: a template does with a long text what it does with one character.
      text = tokenizer.render([{"role": "user", "content": _MARK}])
      if text.count(_MARK) != 1:
        raise ValueError(
          f"chat_template: found a user's text {text.count(_MARK)} times in a chat, expected once"
        )
      before, behind = text.split(_MARK)
      self._markup = before, behind

  def encode(self, context: str, question: str, answer_prefix: str) -> Prompt:
    """Token ids; in a chat the answer begins without its leading space."""
    if self._markup is None:
      head = self._tokenizer.encode(context)
      return Prompt(head, self._tokenizer.encode(question + answer_prefix, bos=False))
    before, behind = self._markup
    head = self._tokenizer.encode(before + context, bos=False)
    tail = self._tokenizer.encode(question + behind + answer_prefix.lstrip(), bos=False)
    return Prompt(head, tail)

  def row(self, row: Row) -> Prompt:
    """Token ids of a row."""
    return self.encode(row.context, row.question, row.answer_prefix)

  def continuation(self, row: Row) -> list[int]:
    """Token ids of what follows the row in its source, as many as the row reserves.

    Raises:
      ValueError: there are fewer.
    """
    ids = self._tokenizer.encode(row.continuation, bos=False)
    if len(ids) < row.max_new_tokens:
      raise ValueError(
        f"{row.task}: found {len(ids)} tokens to follow, expected {row.max_new_tokens}"
      )
    return ids[: row.max_new_tokens]

  @property
  def count(self) -> Count:
    """How tasks count tokens."""
    return lambda *texts: len(self.encode(*texts).ids)
